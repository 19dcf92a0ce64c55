"""How fast the simulator runs: eight replicas near saturation, E2 with everything on, one core.

Short answers, conversations with long answers, and prompts of ten thousand tokens cost time in different places. The
result is the simulated seconds per CPU second, and the CPU time per iteration and request. The workloads are made
before the clock starts; the garbage collector is set as in `preble simulate`.

    python benchmarks/micro/simulate.py                                   # all three, three runs each
    python benchmarks/micro/simulate.py --workload toolbench --rps 45 --requests 20000 --json result.json
"""

from __future__ import annotations

import argparse
import platform
import time
from dataclasses import dataclass
from pathlib import Path

from preble.cli.output import STDOUT, write_json
from preble.lab.sim import SimConfig, SimResult, simulate
from preble.lab.sim.memory import fewer_collections
from preble.lab.workloads import Workload, WorkloadPlan
from preble.profiles import load_profile

PROFILE = "a6000-mistral-7b"
LOADS = {"toolbench": 40.0, "multiturn": 50.0, "video": 20.0}
"""Workload and requests a second with which eight of these replicas are busy for most of the time."""


@dataclass(frozen=True)
class Row:
    """One workload, the fastest of its runs. `cpu_s`: of the processor; `busy`: part of the replicas' time."""

    workload: str
    rps: float
    policy: str
    replicas: int
    requests: int
    simulated_s: float
    busy: float
    iterations: int
    cpu_s: float

    @property
    def times_real_time(self) -> float:
        return self.simulated_s / self.cpu_s

    def __str__(self) -> str:
        per_iteration, per_request = (1e6 * self.cpu_s / count for count in (self.iterations, self.requests))
        return (
            f"{self.workload:10} {self.rps:3g} requests/s, replicas {self.busy:4.0%} busy: "
            f"{self.times_real_time:4.0f} x real time, {per_iteration:5.0f} us/iteration, {per_request:5.0f} us/request"
        )


def timed(config: SimConfig, workload: Workload) -> tuple[float, SimResult]:
    """Seconds of the processor, and the result."""
    started = time.process_time()
    result = simulate(config, workload)
    return time.process_time() - started, result


def measure(source: str, rps: float, args: argparse.Namespace) -> Row:
    plan = WorkloadPlan(source=source, requests=args.requests, rps=rps, seed=args.seed)
    workload = plan.make()
    config = SimConfig(profile=load_profile(PROFILE), replicas=args.replicas, policy=args.policy, seed=args.seed)
    cpu_s, result = min((timed(config, workload) for _ in range(args.runs)), key=lambda run: run[0])
    duration_s = result.summary.duration_s
    return Row(
        workload=workload.name,
        rps=rps,
        policy=args.policy,
        replicas=args.replicas,
        requests=len(workload.requests),
        simulated_s=duration_s,
        busy=result.gpu_s / duration_s / args.replicas,
        iterations=sum(totals.iterations for totals in result.replicas.values()),
        cpu_s=cpu_s,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", help="name or trace file (default: all three)")
    parser.add_argument("--rps", type=float, help="requests a second, with --workload")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--policy", default="e2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3, help="runs of each workload; the fastest counts")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers; - for stdout, in place of the text"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    loads = LOADS if args.workload is None else {args.workload: args.rps or LOADS.get(args.workload, 10.0)}
    rows = []
    with fewer_collections():
        for source, rps in loads.items():
            rows.append(measure(source, rps, args))
            if args.json != STDOUT:
                print(rows[-1], flush=True)
    about = {"python": platform.python_version(), "machine": platform.machine(), "profile": PROFILE}
    write_json(args.json, about | {"rows": rows})


if __name__ == "__main__":
    main()
