"""What several gateways cost that place for one cluster, by what they tell each other and how late.

    python benchmarks/repro/gateways.py            # make what is missing (about an hour on one core), write, draw
    python benchmarks/repro/gateways.py --draw     # draw from the results that are there

The simulator with G schedulers and the messages of real gateways (`preble.peers`), for three seeds. Each number is a
run's mean TTFT (or its p99) over that of one gateway with the same requests. `--wide` makes the runs of 400 replicas.
The last case is two clusters, each with its own gateway and half of the replicas, and ways to choose between them.
Results: benchmarks/results/gateways.json. Drawn into docs/concepts/scale.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import msgspec
from made_by import note, old
from page import NOT_RUN, filled, markdown

from preble.lab.metrics.estimates import estimate
from preble.lab.metrics.summary import percentile
from preble.lab.report import Table
from preble.lab.sim import Cut, GatewayGroup, SimConfig, Simulation
from preble.lab.sim.gateways import Gateways, make_cluster_scheduler
from preble.lab.sim.memory import fewer_collections
from preble.lab.workloads import Workload, WorkloadPlan, WorkloadRequest
from preble.profiles import load_profile

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "gateways.json"
KV_DECODE = ROOT / "benchmarks" / "results" / "kv_decode.json"
PAGE = ROOT / "docs" / "concepts" / "scale.md"
PROFILE = "a100-mistral-7b"
SEEDS = (1, 2, 3)
NEVER, SOON = "never", "50 ms"
TOLD = {
    NEVER: GatewayGroup(delay_s=None),
    "10 ms": GatewayGroup(delay_s=0.01),
    SOON: GatewayGroup(delay_s=0.05),
    "200 ms": GatewayGroup(delay_s=0.2),
    "1 s": GatewayGroup(delay_s=1.0),
    "50 ms, 5 % lost": GatewayGroup(delay_s=0.05, loss=0.05),
    "50 ms, 30 % lost": GatewayGroup(delay_s=0.05, loss=0.3),
    "50 ms, cut from 3 to 8 s": GatewayGroup(delay_s=0.05, cuts=(Cut(3.0, 8.0),)),
}
FIRST = (NEVER, SOON)
NOT_CUT = (NEVER, "10 ms", SOON, "200 ms", "50 ms, 30 % lost")


CLUSTERS = {
    "hash of the prompt's first 64 tokens": lambda request: request.prompt()[: 300 if request.segments[0].text else 64],
    "hash of its conversation's name": lambda request: request.session or request.request_id,
}
"""What decides which of two clusters a request goes to. 64 tokens of text are about 300 characters."""


class Case(msgspec.Struct, frozen=True):
    """`bar`: the most that several gateways may cost with 50 ms, as a multiple of one's mean TTFT."""

    title: str
    source: str
    rps: float
    requests: int
    replicas: int = 8
    seeds: tuple[int, ...] = SEEDS
    groups: tuple[int, ...] = (2, 4, 8)
    told_to_four: tuple[str, ...] = tuple(TOLD)
    bar: float | None = None
    in_clusters: bool = False


CASES = {
    "longdoc": Case("long documents, 30/s", "longdoc", 30.0, 600, bar=1.15),
    "tool_use": Case(
        "tool use, 130/s",
        "tool_use",
        130.0,
        1500,
        told_to_four=NOT_CUT,
        bar=1.25,
    ),
    "multiturn": Case("conversations, 120/s", "multiturn", 120.0, 1200, groups=(4,), told_to_four=FIRST),
    "clusters.tool_use": Case("tool use, 130/s", "tool_use", 130.0, 1500, groups=(), in_clusters=True),
    "clusters.multiturn": Case("conversations, 120/s", "multiturn", 120.0, 1200, groups=(), in_clusters=True),
    "wide": Case("tool use, 5,000/s, 400 replicas", "tool_use", 5000.0, 15_000, 400, (1,), (2, 4), FIRST),
}


class Run(msgspec.Struct, frozen=True):
    """One simulation; times in seconds. `told`: a key of `TOLD`, "" for one gateway. `told_bytes`: of all gateways, a
    request. `imbalance`: the busiest GPU's time over the mean."""

    case: str
    gateways: int
    told: str
    seed: int
    failed: int
    ttft_mean_s: float
    ttft_p99_s: float
    e2e_mean_s: float
    hit_rate: float
    imbalance: float
    told_bytes: float


def arms(name: str) -> Iterator[tuple[int, str]]:
    """(gateways, told) of a case."""
    case = CASES[name]
    yield 1, ""
    if case.in_clusters:
        yield from ((2, how) for how in CLUSTERS)
    for gateways in case.groups:
        for told in case.told_to_four if gateways == 4 else FIRST:
            yield gateways, told


def run(name: str, gateways: int, told: str, seed: int) -> Run:
    case = CASES[name]
    group = msgspec.structs.replace(TOLD[told], gateways=gateways) if told in TOLD else None
    config = SimConfig(profile=load_profile(PROFILE), replicas=case.replicas, seed=seed, group=group)
    workload = WorkloadPlan(source=case.source, requests=case.requests, seed=seed, rps=case.rps).make()
    results, told_bytes = [], 0.0
    for part in parts(workload, told) if told in CLUSTERS else [workload]:
        own = msgspec.structs.replace(config, replicas=case.replicas // 2) if told in CLUSTERS else config
        scheduler = make_cluster_scheduler(own)
        with fewer_collections():
            results.append(Simulation(own, part, scheduler=scheduler).run())
        told_bytes += scheduler.told_bytes if isinstance(scheduler, Gateways) else 0.0
    records = [record for result in results for record in result.records]
    ok = [record for record in records if record.ok]
    ttfts = sorted(record.ttft_s for record in ok if record.ttft_s is not None)
    totals = [total for result in results for total in result.replicas.values()]
    hits, computed = sum(t.hit_tokens for t in totals), sum(t.prefill_tokens for t in totals)
    busy = [t.gpu_s for t in totals]
    busy += [0.0] * (case.replicas - len(busy))  # of a cluster that got no request
    return Run(
        case=name,
        gateways=gateways,
        told=told,
        seed=seed,
        failed=len(records) - len(ok),
        ttft_mean_s=sum(ttfts) / len(ttfts),
        ttft_p99_s=percentile(ttfts, 99),
        e2e_mean_s=sum(record.end_s - record.scheduled_s for record in ok) / len(ok),
        hit_rate=hits / (hits + computed),
        imbalance=max(busy) * len(busy) / sum(busy),
        told_bytes=told_bytes / len(ok),
    )


def parts(workload: Workload, how: str) -> list[Workload]:
    """The requests of each of two clusters, if it gets any; a conversation stays where it began."""
    chosen: dict[str, int] = {}
    halves: list[list[WorkloadRequest]] = [[], []]
    for request in workload.requests:
        cluster = chosen.get(request.parent or "")
        if cluster is None:
            cluster = crc32(repr(CLUSTERS[how](request)).encode()) % 2
        chosen[request.request_id] = cluster
        halves[cluster].append(request)
    return [Workload(workload.name, tuple(half)) for half in halves if half]


# drawing


class Runs:
    """The kept runs, by what they are of."""

    def __init__(self, runs: list[Run]) -> None:
        self._runs = {(run.case, run.gateways, run.told, run.seed): run for run in runs}

    def of(self, case: str, gateways: int, told: str) -> list[Run]:
        """One a seed; none where one is missing."""
        found = [self._runs.get((case, gateways, told, seed)) for seed in CASES[case].seeds]
        return [run for run in found if run is not None] if all(found) else []

    def times(self, case: str, gateways: int, told: str, what: str) -> list[float]:
        """Each seed's number over that of one gateway."""
        alone = self.of(case, 1, "")
        pairs = zip(self.of(case, gateways, told), alone, strict=False)
        return [getattr(run, what) / getattr(one, what) for run, one in pairs]


def interval(values: list[float]) -> str:
    if not values:
        return "-"
    of_it = estimate(values)
    return f"{of_it.mean:.2f}" if of_it.half_width is None else f"{of_it.mean:.2f} ± {of_it.half_width:.2f}"


def table(runs: Runs, name: str) -> str:
    rows = []
    for gateways, told in arms(name):
        of_it = runs.of(name, gateways, told)
        if not of_it:
            continue
        cells = [interval(runs.times(name, gateways, told, w)) for w in ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s")]
        hit = sum(run.hit_rate for run in of_it) / len(of_it)
        even = sum(run.imbalance for run in of_it) / len(of_it)
        told_bytes = sum(run.told_bytes for run in of_it) / len(of_it)
        rows.append([str(gateways), told or "-", *cells, f"{hit:.3f}", f"{even:.2f}", f"{told_bytes:,.0f}"])
    if not rows:
        return NOT_RUN
    case = CASES[name]
    columns = ["clusters", "chosen by the"] if case.in_clusters else ["gateways", "told after"]
    columns += ["TTFT", "its p99", "E2E", "hit rate", "GPU max/mean", "bytes told a request"]
    alone = runs.of(name, 1, "")
    mean_ms = 1e3 * sum(run.ttft_mean_s for run in alone) / max(len(alone), 1)
    caption = (
        f"{case.title[0].upper() + case.title[1:]}, {case.replicas} replicas (A100, Mistral-7B), {case.requests:,} "
        f"requests, seeds {', '.join(map(str, case.seeds))}. TTFT, its p99 and E2E are means over the seeds, with "
        f"95 % intervals, of multiples of one gateway's; its mean TTFT is {mean_ms:.0f} ms."
    )
    return markdown(Table(columns, rows, caption))


def drawn(runs: list[Run]) -> dict[str, str]:
    """What stands between the markers of the page."""
    kept = Runs(runs)
    return {f"gateways.{name}": table(kept, name) for name in CASES} | {"kv_decode": kv_decode()}


def kv_decode() -> str:
    """Of benchmarks/micro/kv_decode.py: what following KV events costs."""
    result = msgspec.json.decode(KV_DECODE.read_bytes())
    rows = [
        [
            cost["what"],
            "one by one" if cost["paced"] else "together",
            f"{cost['us_a_message']:.0f} µs",
            f"{cost['us_a_request']:.0f} µs",
            "" if cost["paced"] else f"{cost['cores']:.2f}",
        ]
        for cost in result["costs"]
    ]
    columns = ["KV events", "messages", "a message", "a request", "cores for 400 replicas at 5,000 requests/s"]
    caption = (
        f"CPU time. {result['messages']:,} messages of one replica, for {result['requests']} requests and "
        f"{result['stored_blocks']:,} blocks stored. *Together*: in bursts, as under load. *One by one*: every 2.5 ms."
    )
    return markdown(Table(columns, rows, caption))


def read() -> list[Run]:
    return msgspec.json.decode(RESULT.read_bytes(), type=list[Run]) if RESULT.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wide", action="store_true", help="only the case with many replicas")
    parser.add_argument("--draw", action="store_true", help="run nothing: fill in the page from the kept result")
    options = parser.parse_args()
    runs = read()
    if not options.draw:
        if "gateways" in old():
            runs = []  # one result is of one policy
        known = {(run.case, run.gateways, run.told, run.seed) for run in runs}
        for name, case in CASES.items():
            if (name == "wide") != options.wide:
                continue
            for seed in case.seeds:
                for gateways, told in arms(name):
                    if (name, gateways, told, seed) in known:
                        continue
                    started = time.perf_counter()
                    runs.append(run(name, gateways, told, seed))
                    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")
                    note("gateways")
                    print(f"{time.perf_counter() - started:.0f} s: {runs[-1]}", file=sys.stderr, flush=True)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), drawn(runs)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
