"""Hits and misses in the queue of one replica: time to first token of each, in every order of waiting requests.

    python benchmarks/repro/fairness.py                        # simulate, write the results, draw
    python benchmarks/repro/fairness.py --engine vllm          # the same on a replica on this machine
    python benchmarks/repro/fairness.py --draw                 # draw from the results that are there

The case of sglang#31954: 95 % of the requests hit one of a few prefixes, 5 % are misses of the same length; Poisson
arrivals near what the replica can bear, the same ones for every order. `--engine`: simulator, emulator, or vllm and
sglang, which run a tiny model on the CPU and are set up by `make engines`.

Results: benchmarks/results/fairness.ENGINE.json, and where `--json` says. Figures: docs/concepts/fairness/. Needs the
extra `plot` to draw.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from statistics import median
from unittest.mock import patch

import msgspec
from fairness_case import (
    FULL,
    RUSH,
    Case,
    Point,
    Results,
    Run,
    burst,
    condense,
    mid,
    requests_per_s,
    select,
    warm_up,
    workload,
)
from page import filled

from preble.cli.output import STDOUT, write_json
from preble.core.replica.waiting_queue import QueueOrder
from preble.engines.starting.launch import Fleet, LaunchOptions
from preble.integrations.settings import ORDER_VARIABLE
from preble.lab.bench.client import BenchClient
from preble.lab.bench.load import run_load
from preble.lab.metrics import RequestRecord
from preble.lab.sim import SimConfig, simulate
from preble.lab.workloads import Workload
from preble.profiles import load_profile

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "concepts" / "fairness.md"
REPLICAS = ("emulator", "vllm", "sglang")
ENGINES = ("simulator", *REPLICAS)
PROFILE = "a6000-mistral-7b"
MODEL = ROOT / ".engines" / "models" / "tiny-llama"
READY_S, WARM_UP_S = 300.0, 60.0

GPU = Case(requests=2000, burst=1000, places=16, output_tokens=(32, 96), prefix_tokens=3840, tail_tokens=256)
CPU = Case(requests=400, burst=160, places=8, output_tokens=(8, 24), prefix_tokens=1920, tail_tokens=128)
CASES = {
    "simulator": GPU,
    "emulator": msgspec.structs.replace(GPU, requests=500),
    "vllm": CPU,
    "sglang": msgspec.structs.replace(CPU, requests=240, burst=80),
}
POINTS = [*map(Point, (0.7, 0.8, 0.9, 0.95)), FULL, RUSH, Point(0.95, 0.2), Point(0.95, 0.5)]
SEEDS = range(5)


class Arm(msgspec.Struct, frozen=True):
    """One order on one engine. `args`, `environ`: with which the engine has it."""

    order: str
    label: str
    args: tuple[str, ...] = ()
    environ: Mapping[str, str] = {}


def inside_vllm(order: str) -> tuple[str, ...]:
    scheduler = "preble.integrations.vllm_scheduler.PrebleScheduler"
    return ("--scheduler-cls", scheduler, "--additional-config", f'{{"preble": {{"order": "{order}"}}}}')


ARMS = {
    "simulator": [Arm(order, order) for order in QueueOrder],
    "emulator": [Arm(order, order, ("--order", order)) for order in QueueOrder],
    "vllm": [
        Arm("fcfs", "fcfs (vLLM's own)"),
        Arm("lpm", "lpm", inside_vllm("lpm")),
        Arm("groups", "groups", inside_vllm("groups")),
    ],
    "sglang": [
        Arm("fcfs", "fcfs (SGLang's own)"),
        Arm("lpm", "lpm (SGLang's own)", ("--schedule-policy", "lpm")),
        Arm("groups", "groups", environ={ORDER_VARIABLE: "groups"}),
        Arm("hrrn", "hrrn (SGLang's own)", ("--schedule-policy", "hrrn")),
    ],
}

# ---- on the simulator ----------------------------------------------------------------------------------------------


def simulate_all() -> Results:
    runs = []
    for point in POINTS:
        capacity_rps = simulated_capacity(point.misses)
        for seed in SEEDS:
            print(f"fairness: {point.utilisation:.0%}, {point.misses:.0%} misses, seed {seed}", file=sys.stderr)
            load = workload(GPU, point, capacity_rps, seed)
            records = {str(order): simulated(order, seed, load) for order in QueueOrder}
            runs += [condense(order, point, seed, capacity_rps, r) for order, r in records.items()]
    return Results("simulator", GPU, runs)


@cache
def simulated_capacity(misses: float) -> float:
    """Requests/s, the median over the seeds."""
    return median(requests_per_s(simulated(QueueOrder.FCFS, seed, burst(GPU, misses, seed))) for seed in SEEDS)


def simulated(order: QueueOrder, seed: int, load: Workload) -> list[RequestRecord]:
    """The warm-up, and a minute later the load."""
    later = load.with_arrivals([WARM_UP_S + (request.arrival_s or 0.0) for request in load.requests])
    config = SimConfig(
        profile=load_profile(PROFILE),
        replicas=1,
        policy="round_robin",
        order=order,
        max_running=GPU.places,
    )
    return simulate(config, Workload("fairness", warm_up(GPU, seed).requests + later.requests)).records


# ---- on replicas ---------------------------------------------------------------------------------------------------


async def measure_all(engine: str, rounds: int) -> Results:
    """Each order has a replica of its own, and all get the same load at the same time.

    One after the other, each would run beside different other work on the machine; this way they share it evenly.
    """
    case, arms, runs = CASES[engine], ARMS[engine], []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clients = [await stack.enter_async_context(started(engine, arm, folder)) for arm in arms]
        await answers_of_all(case, clients, -1, warm_up(case, -1))
        for seed in range(rounds):
            capacity_rps = await capacity(engine, clients, rounds + seed)
            print(f"fairness: {engine}, round {seed}, {capacity_rps:.1f} requests/s", file=sys.stderr)
            answered = await answers_of_all(case, clients, seed, workload(case, RUSH, capacity_rps, seed))
            for arm, records in zip(arms, answered, strict=True):
                runs.append(condense(arm.order, RUSH, seed, capacity_rps, records))
    return Results(engine, case, runs)


async def capacity(engine: str, clients: Sequence[BenchClient], seed: int) -> float:
    """Requests/s of one replica while all work. An emulated one takes the time that a simulated one takes."""
    if engine == "emulator":
        return simulated_capacity(RUSH.misses)
    bursts = await answers_of_all(CASES[engine], clients, seed, burst(CASES[engine], RUSH.misses, seed))
    return median(map(requests_per_s, bursts))


async def answers_of_all(
    case: Case, clients: Sequence[BenchClient], seed: int, load: Workload
) -> list[list[RequestRecord]]:
    """What each answers to the load, the prefixes of the seed cached before."""
    await asyncio.gather(*(answers(client, warm_up(case, seed)) for client in clients))
    return await asyncio.gather(*(answers(client, load) for client in clients))


@asynccontextmanager
async def started(engine: str, arm: Arm, folder: Path) -> AsyncIterator[BenchClient]:
    """A replica with this order, for as long as the context lasts."""
    with patch.dict(os.environ, arm.environ):
        fleet = Fleet(launch_options(engine, arm, folder / arm.order))
    async with fleet, BenchClient(fleet.urls[0]) as client:
        await client.find_model()
        yield client


def launch_options(engine: str, arm: Arm, log_dir: Path) -> LaunchOptions:
    places = str(CASES[engine].places)
    if engine == "emulator":
        args = ("--max-running", places, *arm.args)
        return LaunchOptions(engine="emulator", replicas=1, log_dir=log_dir, profile=PROFILE, extra_args=args)
    limit = ("--max-num-seqs",) if engine == "vllm" else ("--sleep-on-idle", "--max-running-requests")
    return LaunchOptions(
        engine="vllm" if engine == "vllm" else "sglang",
        replicas=1,
        threads=1,
        log_dir=log_dir,
        model=str(MODEL),
        max_model_len=4096,
        device="cpu",
        extra_args=(*limit, places, *arm.args),
        ready_timeout_s=READY_S,
    )


async def answers(client: BenchClient, load: Workload) -> list[RequestRecord]:
    """Send it and wait for the last answer."""
    records: list[RequestRecord] = []
    await run_load(client, load, records.append)
    return records


# ---- what is shown -------------------------------------------------------------------------------------------------


def table(results: Results, points: Sequence[Point] = ()) -> str:
    """Medians over the seeds, as a Markdown table; all points where none are named."""
    lines = [
        "| misses | utilisation | order | hits: median TTFT | p99 | misses: median TTFT | p99 "
        "| misses' share of all TTFT | mean TTFT | waiting, mean |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for point in points or dict.fromkeys(run.point for run in results.runs):
        lines += [row(arm, point, select(results, arm.order, point)) for arm in ARMS[results.engine]]
    return "\n".join(lines)


def row(arm: Arm, point: Point, runs: list[Run]) -> str:
    times = (
        mid(runs, lambda run: run.hits.ttft.p50_s),
        mid(runs, lambda run: run.hits.ttft.p99_s),
        mid(runs, lambda run: run.misses.ttft.p50_s),
        mid(runs, lambda run: run.misses.ttft.p99_s),
    )
    cells = [f"{point.misses:.0%}", f"{point.utilisation:.0%}", arm.label, *map(seconds, times)]
    cells += [f"{mid(runs, lambda run: run.share_of_misses):.0%}", seconds(mid(runs, lambda run: run.ttft.mean_s))]
    return f"| {' | '.join(cells)} | {mid(runs, lambda run: run.waiting_mean):.0f} |"


def seconds(value: float) -> str:
    """
    >>> seconds(0.123), seconds(12.34)
    ('0.12 s', '12.3 s')
    """
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def slowdowns() -> list[float]:
    """The misses' p99 in `lpm` as a multiple of that in `groups`, for each round on replicas."""
    found = []
    for engine in REPLICAS:
        runs = results_of(engine).runs
        p99_s = {(run.seed, run.order): run.misses.ttft.p99_s for run in runs}
        found += [p99_s[seed, "lpm"] / p99_s[seed, "groups"] for seed in sorted({run.seed for run in runs})]
    return found


def values() -> dict[str, str]:
    """What the sentences of the page say, by marker."""
    found = slowdowns()
    return {
        "value:slowdown": f"{min(found):.1f} to {max(found):.0f}",
        "value:slowdown-median": f"{median(found):.1f}",
        "value:rounds": str(len(found)),
    }


def results_path(engine: str) -> Path:
    return RESULTS / f"fairness.{engine}.json"


def results_of(engine: str) -> Results:
    """Raises: FileNotFoundError: nobody has measured it."""
    return msgspec.json.decode(results_path(engine).read_bytes(), type=Results)


def main() -> None:
    parser = argparse.ArgumentParser(description="Hits and misses in the queue of one replica.")
    parser.add_argument("--engine", choices=ENGINES, default="simulator")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each order on replicas")
    parser.add_argument("--draw", action="store_true", help="draw from the kept results")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results to FILE; - for stdout, instead of the table"
    )
    options = parser.parse_args()
    if not options.draw:
        simulates = options.engine == "simulator"
        results = simulate_all() if simulates else asyncio.run(measure_all(options.engine, options.rounds))
        RESULTS.mkdir(parents=True, exist_ok=True)
        results_path(options.engine).write_bytes(msgspec.json.encode(results))
    results = results_of(options.engine)
    write_json(options.json, results)
    if options.json != STDOUT:
        print(table(results))
    from fairness_figures import draw_all  # needs matplotlib, and only now

    for path in draw_all({engine: results_of(engine) for engine in ENGINES if results_path(engine).exists()}):
        print(f"fairness: drawn to {path.relative_to(ROOT)}", file=sys.stderr)
    if all(results_path(engine).exists() for engine in REPLICAS):
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), values()), encoding="utf-8")


if __name__ == "__main__":
    main()
