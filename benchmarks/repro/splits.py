"""What splitting requests between replicas gains and costs, against `preble` without splits (docs/concepts/splits.md).

    python benchmarks/repro/splits.py                    # six seeds: some 20 minutes on two quiet cores
    python benchmarks/repro/splits.py --case "tool use"  # only this case; those that are kept already are not run again
    python benchmarks/repro/splits.py --draw             # fill in the page from the results that are there

The same requests on the same replicas. Without splits, with chunks of 256, 512 and 2,048 tokens; the changes are
against the one with the shortest E2E. With splits, chosen for each request, and copies. With fixed pools, where some
replicas compute every prompt and the others decode every answer. Results: benchmarks/results/splits.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from cases import Kept, change, play_and_draw
from made_by import values
from page import fill

from preble.core.types import Placement, TransferKind
from preble.decisions.settings import make_scheduler
from preble.lab.metrics.steady import steadiness
from preble.lab.sim import SimConfig, SimLinks, Simulation
from preble.lab.sim.memory import fewer_collections
from preble.lab.workloads import WorkloadPlan
from preble.profiles import load_profile, with_kv_size

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "splits.md"
SEEDS = (10, 11, 12, 13, 14, 15)
LINK = 12.5
"""Rate of links in GB/s: 100 Gbit/s."""
CHUNKS = (256, 512, 2048)
LLAMA, MISTRAL = "h100x2-llama-3-70b", "a6000-mistral-7b"
REPLICA = {LLAMA: "(2 x H100), 70B", MISTRAL: "A6000, 7B"}
"""How the page names one replica of a profile."""


@dataclass(frozen=True)
class Case:
    """One workload at one rate on one cluster; `answer`: tokens of every answer, 0 for the workload's own. `pools`: how
    many replicas of the fixed pools compute prompts.
    """

    source: str
    requests: int
    rps: float
    replicas: int = 4
    answer: int = 0
    options: Mapping[str, object] = field(default_factory=dict)
    pools: tuple[int, ...] = (1, 2)
    link: float = LINK
    profile: str = LLAMA


CASES: Mapping[str, Case] = {
    "nothing shared, 512 out": Case("unshared", 1500, 10, replicas=8, answer=512, pools=(2, 3)),
    "nothing shared, 512 out, slow link": Case("unshared", 1500, 10, replicas=8, answer=512, pools=(), link=1.25),
    "nothing shared, 512 out, fast link": Case("unshared", 1500, 10, replicas=8, answer=512, pools=(), link=50.0),
    "nothing shared": Case("unshared", 1200, 12),
    "tool use": Case("toolbench", 3000, 45),
    "long documents": Case("longdoc", 1500, 2.5, options={"num_prefixes": 40}, pools=(1,)),
    "programming": Case("programming", 1500, 15),
    "video": Case("video", 1500, 5, options={"num_prefixes": 116}),
    "embodied agent": Case("agent", 4000, 120),
    "nothing shared, 512 out, 7B": Case("unshared", 1500, 10, replicas=8, answer=512, pools=(2, 3), profile=MISTRAL),
    "tool use, 7B": Case("toolbench", 3000, 45, pools=(), profile=MISTRAL),
    "long documents, 7B": Case("longdoc", 1500, 2.5, options={"num_prefixes": 40}, pools=(), profile=MISTRAL),
    "programming, 7B": Case("programming", 1500, 15, pools=(), profile=MISTRAL),
    "video, 7B": Case("video", 1500, 5, options={"num_prefixes": 116}, pools=(), profile=MISTRAL),
    "embodied agent, 7B": Case("agent", 4000, 120, pools=(), profile=MISTRAL),
}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times in seconds. `way`: "chunk 256" and so on, "split", or "2 prefill". `computed`, `prompt`: tokens.

    `split`: the share of the requests. `steady`: the verdict.
    """

    case: str
    way: str
    seed: int
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    itl_p999_s: float
    e2e_mean_s: float
    prompt: int
    computed: int
    split: float
    steady: str

    @property
    def key(self) -> tuple[str, str, int]:
        return self.case, self.way, self.seed


def ways(case: Case) -> list[str]:
    """Return the ways in which a case is run."""
    return [*(f"chunk {chunk}" for chunk in CHUNKS), "split", *(f"{size} prefill" for size in case.pools)]


def measure(name: str, way: str, seed: int) -> Measured:
    case = CASES[name]
    plan = WorkloadPlan(
        source=case.source,
        requests=case.requests,
        rps=case.rps,
        seed=seed,
        **case.options,  # type: ignore[arg-type]
    )
    workload = plan.make()
    if case.answer:
        asked = tuple(replace(request, output_tokens=case.answer) for request in workload.requests)
        workload = replace(workload, requests=asked)
    chunk = int(way.removeprefix("chunk ")) if way.startswith("chunk") else max(CHUNKS)
    config = SimConfig(
        profile=with_kv_size(load_profile(case.profile)),
        replicas=case.replicas,
        seed=seed,
        max_batch_tokens=chunk,
        links=SimLinks(
            bytes_per_s=case.link * 1e9,
            splits=way == "split",
            prefill=int(way.split()[0]) if way.endswith("prefill") else 0,
        ),
    )
    kinds: list[TransferKind | None] = []

    def on_placement(placement: Placement, now: float) -> None:
        kinds.append(placement.transfer.kind if placement.transfer is not None else None)

    scheduler = make_scheduler(config.scheduler_settings, config.told_profile)
    with fewer_collections():
        result = Simulation(config, workload, scheduler=scheduler, on_placement=on_placement).run()
    steady = steadiness(result.records, until_s=max(request.arrival_s or 0.0 for request in workload.openers))
    summary = steady.summary
    assert summary.ttft is not None and summary.itl is not None and summary.e2e is not None
    return Measured(
        case=name,
        way=way,
        seed=seed,
        ttft_p50_s=summary.ttft.p50_s,
        ttft_p99_s=summary.ttft.p99_s,
        itl_p50_s=summary.itl.p50_s,
        itl_p99_s=summary.itl.p99_s,
        itl_p999_s=summary.itl.p999_s,
        e2e_mean_s=summary.e2e.mean_s,
        prompt=sum(record.prompt_tokens for record in result.records),
        computed=sum(of_one.prefill_tokens for of_one in result.replicas.values()),
        split=kinds.count(TransferKind.PREFILL) / len(kinds),
        steady=str(steady.verdict),
    )


KEPT = Kept(
    "splits",
    Measured,
    lambda one: ([*CASES].index(one.case), ways(CASES[one.case]).index(one.way), one.seed),
    lambda one: (
        f"{one.case:34} {one.way:10} {one.seed:3} ttft {one.ttft_p50_s:.3f} {one.ttft_p99_s:.3f}"
        f" itl {one.itl_p99_s:.4f} e2e {one.e2e_mean_s:.3f} computed {one.computed / one.prompt:.3f}"
        f" split {one.split:.2f} {one.steady}"
    ),
)


def best_chunk(found: Mapping[tuple[str, str, int], Measured], name: str) -> str:
    """Return the way without splits that has the shortest E2E, on the seeds that all of these ways have."""
    chunks = [f"chunk {chunk}" for chunk in CHUNKS]
    seeds = [seed for seed in SEEDS if all((name, way, seed) in found for way in chunks)]
    return min(chunks, key=lambda way: sum(found[name, way, seed].e2e_mean_s for seed in seeds))


def pairs(found: Mapping[tuple[str, str, int], Measured], name: str, way: str) -> tuple[list[Measured], list[Measured]]:
    """Return the runs of a way, and those of the best chunk with the same seeds."""
    best = best_chunk(found, name)
    seeds = [seed for seed in SEEDS if (name, way, seed) in found and (name, best, seed) in found]
    return [found[name, way, seed] for seed in seeds], [found[name, best, seed] for seed in seeds]


def table(found: Mapping[tuple[str, str, int], Measured]) -> str:
    """Markdown: for each case and way, its times, and the change of E2E against the best chunk."""
    rows = [
        "| workload, requests/s, cluster | way | TTFT p50 / p99 s | ITL p99 / p99.9 ms | E2E mean s | E2E "
        "| computed | split | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, case in CASES.items():
        label = f"{name.removesuffix(', 7B')}, {case.rps:g}, {case.replicas} x {REPLICA[case.profile]}"
        for way in ways(case):
            ones, others = pairs(found, name, way)
            if ones:
                rows.append(f"| {label} {_row(way, ones, others)}")
                label = ""
    return "\n".join(rows)


def _row(way: str, ones: list[Measured], others: list[Measured]) -> str:
    unsteady = sum(one.steady != "steady" for one in ones)
    of_each = [
        (one.ttft_p50_s, one.ttft_p99_s, 1e3 * one.itl_p99_s, 1e3 * one.itl_p999_s, one.e2e_mean_s) for one in ones
    ]
    times = [sum(values) / len(ones) for values in zip(*of_each, strict=True)]
    changed = change([one.e2e_mean_s for one in ones], [other.e2e_mean_s for other in others])
    computed = sum(one.computed for one in ones) / sum(one.prompt for one in ones)
    first, last = ones[0].seed, ones[-1].seed
    return (
        f"| {way}{f', {unsteady} not steady' if unsteady else ''} "
        f"| {times[0]:.2f} / {times[1]:.2f} | {times[2]:.0f} / {times[3]:.0f} | {times[4]:.2f} "
        f"| {'' if ones == others else changed} | {computed:.0%} | {sum(one.split for one in ones) / len(ones):.0%} "
        f"| {first if first == last else f'{first} to {last}'} |"
    )


def play(names: list[str], seeds: tuple[int, ...], jobs: int) -> None:
    wanted = [(name, way, seed) for seed in seeds for name in names for way in ways(CASES[name])]
    KEPT.play(measure, wanted, jobs)


def draw() -> None:
    fill([PAGE], {"splits": table(KEPT.known()) + "\n", **values()})


if __name__ == "__main__":
    play_and_draw(__doc__, CASES, SEEDS, play, draw)
