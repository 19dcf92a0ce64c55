"""What copying KV between replicas gains and costs, against `preble` without copies (docs/concepts/copies.md).

    python benchmarks/repro/copies.py                    # hours on two cores with the compiled core (`make native`)
    python benchmarks/repro/copies.py --case "tool use"  # only this case; those that are kept already are not run again
    python benchmarks/repro/copies.py --draw             # fill in the page from the results that are there

The same requests with and without links between the replicas. Of each run counts what came after its warm-up, as
`preble compare` does it. Results: benchmarks/results/copies.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from cases import Kept, change, play_and_draw
from page import fill

from preble.lab.metrics.steady import steadiness
from preble.lab.sim import SimConfig, SimLinks, simulate
from preble.lab.sim.memory import fewer_collections
from preble.lab.workloads import WorkloadPlan
from preble.profiles import load_profile, with_kv_size

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "copies.md"
SEEDS = (10, 11, 12, 13, 14, 15)
FASTER, FAST, SLOW = 50.0, 12.5, 1.25
"""Rates of links in GB/s: 400, 100 and 10 Gbit/s."""


@dataclass(frozen=True)
class Case:
    """One workload at one rate on one cluster; `links`: the rates in GB/s that are compared with no links."""

    source: str
    requests: int
    rps: float
    profile: str = "a6000-mistral-7b"
    replicas: int = 4
    options: Mapping[str, object] = field(default_factory=dict)
    kv_tokens: int | None = None
    links: tuple[float, ...] = (FAST,)


LLAMA = "h100x2-llama-3-70b"
CASES: Mapping[str, Case] = {
    "tool use": Case("toolbench", 3000, 45, links=(FASTER, FAST)),
    "tool use, caches full": Case("toolbench", 8000, 45, options={"num_prefixes": 77}, kv_tokens=40_000),
    "video": Case("video", 3000, 5, options={"num_prefixes": 116}, links=(FASTER, FAST)),
    "long documents": Case("longdoc", 3000, 2.5, options={"num_prefixes": 40}),
    "programming": Case("programming", 1500, 15, links=(FASTER, FAST)),
    "embodied agent": Case("agent", 4000, 120),
    "conversations": Case("multiturn", 3000, 45, links=(FASTER, FAST)),
    "no sharing": Case("unshared", 1200, 12),
    "tool use, 70B": Case("toolbench", 2000, 45, LLAMA, links=(FASTER, FAST, SLOW)),
    "video, 70B": Case("video", 3000, 5, LLAMA, options={"num_prefixes": 116}, links=(FAST, SLOW)),
    "long documents, 70B": Case("longdoc", 3000, 2.5, LLAMA, options={"num_prefixes": 40}, links=(FAST, SLOW)),
}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times in seconds; `computed`, `copied`: tokens; `copies`: their number; `steady`: the verdict."""

    case: str
    link_gb_per_s: float | None
    seed: int
    ttft_mean_s: float
    ttft_p99_s: float
    e2e_mean_s: float
    e2e_p99_s: float
    prompt: int
    computed: int
    copied: int
    copies: int
    steady: str

    @property
    def key(self) -> tuple[str, float | None, int]:
        return self.case, self.link_gb_per_s, self.seed


def measure(name: str, link_gb_per_s: float | None, seed: int) -> Measured:
    case = CASES[name]
    workload = WorkloadPlan(
        source=case.source,
        requests=case.requests,
        rps=case.rps,
        seed=seed,
        **case.options,  # type: ignore[arg-type]
    ).make()
    links = None if link_gb_per_s is None else SimLinks(bytes_per_s=link_gb_per_s * 1e9)
    profile = with_kv_size(load_profile(case.profile))
    config = SimConfig(profile=profile, replicas=case.replicas, kv_tokens=case.kv_tokens, seed=seed, links=links)
    with fewer_collections():
        result = simulate(config, workload)
    steady = steadiness(result.records, until_s=max(request.arrival_s or 0.0 for request in workload.openers))
    summary, totals = steady.summary, result.replicas.values()
    assert summary.ttft is not None and summary.e2e is not None
    return Measured(
        case=name,
        link_gb_per_s=link_gb_per_s,
        seed=seed,
        ttft_mean_s=summary.ttft.mean_s,
        ttft_p99_s=summary.ttft.p99_s,
        e2e_mean_s=summary.e2e.mean_s,
        e2e_p99_s=summary.e2e.p99_s,
        prompt=sum(record.prompt_tokens for record in result.records),
        computed=sum(of_one.prefill_tokens for of_one in totals),
        copied=sum(of_one.copied_tokens for of_one in totals),
        copies=sum(of_one.copies for of_one in totals),
        steady=str(steady.verdict),
    )


KEPT = Kept(
    "copies",
    Measured,
    lambda one: ([*CASES].index(one.case), one.link_gb_per_s or 0.0, one.seed),
    lambda one: (
        f"{one.case:22} {one.link_gb_per_s or 0:6} {one.seed:3} ttft {one.ttft_mean_s:.3f} {one.ttft_p99_s:.3f}"
        f" e2e {one.e2e_mean_s:.3f} {one.e2e_p99_s:.2f} computed {one.computed / one.prompt:.3f}"
        f" copied {one.copied / one.prompt:.4f} {one.copies} {one.steady}"
    ),
)


def table(found: Mapping[tuple[str, float | None, int], Measured]) -> str:
    """Markdown: for each case and link, the changes against no link."""
    rows = [
        "| workload, requests/s | cluster | link | TTFT p99 | E2E mean | copied | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in CASES.items():
        cluster = f"{case.replicas} x {'A6000, 7B' if case.profile != LLAMA else '(2 x H100), 70B'}"
        for link in case.links:
            seeds = [seed for seed in SEEDS if (name, link, seed) in found and (name, None, seed) in found]
            if not seeds:
                continue
            ones = [found[name, link, seed] for seed in seeds]
            others = [found[name, None, seed] for seed in seeds]
            unsteady = sum(
                one.steady != "steady" or other.steady != "steady" for one, other in zip(ones, others, strict=True)
            )
            remark = f", {unsteady} not steady" if unsteady else ""
            rows.append(
                f"| {name.removesuffix(', 70B')}, {case.rps:g} | {cluster} | {link:g} GB/s "
                f"| {change([one.ttft_p99_s for one in ones], [one.ttft_p99_s for one in others])} "
                f"| {change([one.e2e_mean_s for one in ones], [one.e2e_mean_s for one in others])} "
                f"| {sum(one.copied for one in ones) / sum(one.prompt for one in ones):.1%} "
                f"| {seeds[0]} to {seeds[-1]}{remark} |"
            )
    return "\n".join(rows)


def play(names: list[str], seeds: tuple[int, ...], jobs: int) -> None:
    wanted = [(name, link, seed) for seed in seeds for name in names for link in (None, *CASES[name].links)]
    KEPT.play(measure, wanted, jobs)


def draw() -> None:
    fill([PAGE], {"copies": table(KEPT.known()) + "\n"})


if __name__ == "__main__":
    play_and_draw(__doc__, CASES, SEEDS, play, draw)
