"""Whether policies rank through the real gateway as they do in the simulator.

    python benchmarks/repro/gateway_ranking.py                          # simulate, then measure: half an hour
    python benchmarks/repro/gateway_ranking.py --simulate               # only what needs no quiet machine
    python benchmarks/repro/gateway_ranking.py --workload video --policy preble
    python benchmarks/repro/gateway_ranking.py --draw                   # fill in the page, draw the figure

Four emulated replicas and the gateway, each a process of its own, take real time and the same requests at the same
times (open loop) as the simulator. Nothing else may run meanwhile. Each run is kept as it ends in
benchmarks/results/gateway_ranking.json, and what is there is not made again. To draw, the extra `plot` is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop
from gateway_ranking_case import (
    POLICIES,
    PROFILE,
    REPLICAS,
    ROOT,
    SHIFT_S,
    SHIFTS,
    WORKLOADS,
    Cpu,
    Results,
    Run,
    known_results,
)

from preble.engines.starting.launch import Fleet, LaunchOptions, ReplicaProcess
from preble.lab.bench.client import BenchClient
from preble.lab.bench.gateway import started_gateway
from preble.lab.bench.load import run_load
from preble.lab.bench.run import request_progress
from preble.lab.metrics import RequestRecord, Summary, summarize
from preble.lab.sim import SimConfig, simulate
from preble.lab.workloads import Workload, WorkloadPlan
from preble.profiles import load_profile

LOGS = ROOT / "build" / "gateway_ranking"
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

# ---- in the simulator ----------------------------------------------------------------------------------------------


def simulate_missing(results: Results, workload: str, policy: str) -> None:
    plan, done = WORKLOADS[workload], results.simulated(workload, policy)
    load = plan.make()
    for shift in SHIFTS:
        if shift not in done:
            asked = load if shift is None else shifted(load, shift)
            results.keep(Run(plan, policy, simulated(policy, asked), shift=shift))


def simulated(policy: str, load: Workload) -> Summary:
    config = SimConfig(profile=load_profile(PROFILE), replicas=REPLICAS, policy=policy)
    return simulate(config, load).summary


def shifted(load: Workload, seed: int) -> Workload:
    """Each arrival up to `SHIFT_S` later, by chance."""
    rng = random.Random(f"shift/{seed}")
    return load.with_arrivals(sorted((request.arrival_s or 0.0) + rng.uniform(0, SHIFT_S) for request in load.openers))


# ---- through the gateway -------------------------------------------------------------------------------------------


async def measured(plan: WorkloadPlan, policy: str) -> Run:
    """New replicas with empty caches, and a new gateway."""
    load, log_dir = plan.make(), LOGS / f"{plan.source}-{policy}"
    async with Fleet(LaunchOptions(engine="emulator", replicas=REPLICAS, log_dir=log_dir, profile=PROFILE)) as fleet:
        args = ("--policy", policy, "--profile", PROFILE, "--workers", "0")
        async with (
            started_gateway(fleet.urls, args, log_dir / "gateway.log") as gateway,
            BenchClient(gateway.url) as client,
        ):
            await client.find_model()
            return await loaded(plan, policy, load, client, fleet.replicas, gateway)


async def loaded(
    plan: WorkloadPlan,
    policy: str,
    load: Workload,
    client: BenchClient,
    replicas: Sequence[ReplicaProcess],
    gateway: ReplicaProcess,
) -> Run:
    """Send everything, and count what processors do meanwhile."""
    records: list[RequestRecord] = []

    def spent_s() -> tuple[float, float, float]:
        of_replicas = sum(processor_time_s(replica.pid) for replica in replicas)
        return processor_time_s(gateway.pid), of_replicas, time.process_time()

    with request_progress(f"{plan.source}, {policy}", len(load.requests)) as tick:

        def take(record: RequestRecord) -> None:
            records.append(record)
            tick(record)

        before, started = spent_s(), time.monotonic()
        await run_load(client, load, take)
        after, took_s = spent_s(), time.monotonic() - started
    of_gateway, of_replicas, of_client = ((now - then) / took_s for now, then in zip(after, before, strict=True))
    cpu = Cpu(of_gateway, of_replicas, of_client, processors=os.cpu_count() or 1)
    return Run(plan, policy, summarize(records), cpu)


def processor_time_s(pid: int | None) -> float:
    """User and system seconds of a process, by Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S


# ---- together ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="only this workload; repeatable")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="only this policy; repeatable")
    parser.add_argument("--simulate", action="store_true", help="only simulate")
    parser.add_argument("--draw", action="store_true", help="only fill in the page and draw from the kept results")
    options = parser.parse_args()
    results = known_results()
    if options.draw:
        from gateway_ranking_page import fill_in  # needs matplotlib, and only now

        fill_in(results)
        return
    pairs = [(name, policy) for name in options.workload or WORKLOADS for policy in options.policy or POLICIES]
    for name, policy in pairs:
        print(f"gateway_ranking: {name}, {policy}: simulated", file=sys.stderr)
        simulate_missing(results, name, policy)
    for name, policy in pairs:
        if not options.simulate and results.measured(name, policy) is None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                results.keep(runner.run(measured(WORKLOADS[name], policy)))


if __name__ == "__main__":
    main()
