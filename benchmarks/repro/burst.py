"""A burst in one instant: 256 requests that share one cold prefix of 8192 tokens, on 4 simulated replicas.

    python benchmarks/repro/burst.py             # simulate, write the results, draw
    python benchmarks/repro/burst.py --draw      # draw from the results that are there

Results: benchmarks/results/burst.json. Figure: docs/concepts/rebalancing/burst.svg. Needs the extra `plot` to draw.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from made_by import note
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from page import is_only_drawn

from preble.lab.metrics import Summary
from preble.lab.sim import SimConfig, simulate
from preble.lab.workloads import Segment, Workload, WorkloadRequest
from preble.lab.workloads.trace import made_up_tokens
from preble.profiles import load_profile

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "burst.json"
FIGURE = ROOT / "docs" / "concepts" / "rebalancing" / "burst.svg"
PROFILE = "a6000-mistral-7b"
REPLICAS, REQUESTS, PREFIX_TOKENS, TAIL_TOKENS = 4, 256, 8192, (100, 200)
SEEDS = range(5)
POLICIES = ("e2", "e2_per_request", "round_robin", "least_load")
LABELS = {
    "e2": "e2",
    "e2_per_request": "e2 without rebalancing",
    "round_robin": "round robin",
    "least_load": "least load",
}
COLOURS = {"e2": "#0b6e4f", "e2_per_request": "#c8385a", "round_robin": "#3d6fb6", "least_load": "#d98e04"}


class Variant(msgspec.Struct, frozen=True):
    """One form of the burst. `kv_tokens`: of one replica, None for the profile's."""

    name: str
    output_tokens: tuple[int, int] = (43, 43)
    kv_tokens: int | None = None


VARIANTS = (
    Variant("43 output tokens"),
    Variant("20 to 66 output tokens", (20, 66)),
    Variant("200 output tokens", (200, 200)),
    Variant("200 output tokens, KV for 30,000", (200, 200), 30_000),
)


class Run(msgspec.Struct, frozen=True):
    """One simulation. `replicas`: in the cluster; `used`: that got a request. `last_finish_s`: of the last request."""

    variant: str
    policy: str
    replicas: int
    seed: int
    used: int
    gpu_s: float
    last_finish_s: float
    prefill_tokens: int
    preemptions: int
    reasons: dict[str, int]
    summary: Summary


def burst(variant: Variant, seed: int) -> Workload:
    """Every request at 0 s: the shared prefix, then a tail that no other request has."""
    rng = random.Random(f"burst/{seed}")
    document = Segment("document", tokens=made_up_tokens("document", PREFIX_TOKENS))

    def requests() -> Iterator[WorkloadRequest]:
        for i in range(REQUESTS):
            tail = Segment(tokens=made_up_tokens(f"tail {seed} {i}", rng.randint(*TAIL_TOKENS)))
            yield WorkloadRequest(f"q{i}", (document, tail), rng.randint(*variant.output_tokens), arrival_s=0.0)

    return Workload("burst", tuple(requests()))


def run(variant: Variant, policy: str, replicas: int, seed: int) -> Run:
    config = SimConfig(
        profile=load_profile(PROFILE), replicas=replicas, policy=policy, kv_tokens=variant.kv_tokens, seed=seed
    )
    result = simulate(config, burst(variant, seed))
    return Run(
        variant=variant.name,
        policy=policy,
        replicas=replicas,
        seed=seed,
        used=len(result.summary.requests_per_replica),
        gpu_s=result.gpu_s,
        last_finish_s=max(record.end_s for record in result.records),
        prefill_tokens=sum(totals.prefill_tokens for totals in result.replicas.values()),
        preemptions=sum(totals.preemptions for totals in result.replicas.values()),
        reasons=result.reasons,
        summary=result.summary,
    )


def run_all() -> list[Run]:
    """Every policy on every variant; round robin on fewer replicas too: what an even split over them costs."""
    runs = []
    for variant in VARIANTS:
        arms = [(policy, REPLICAS) for policy in POLICIES] + [("round_robin", n) for n in range(1, REPLICAS)]
        for seed in SEEDS:
            print(f"burst: {variant.name}, seed {seed}", file=sys.stderr)
            runs += [run(variant, policy, replicas, seed) for policy, replicas in arms]
    return runs


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def select(runs: list[Run], variant: Variant, policy: str, replicas: int = REPLICAS) -> list[Run]:
    return [r for r in runs if (r.variant, r.policy, r.replicas) == (variant.name, policy, replicas)]


def table(runs: list[Run]) -> str:
    """The means over the seeds as a Markdown table."""
    lines = [
        "| burst | policy | replicas used | GPU seconds | last finish | mean TTFT | p99 TTFT | preemptions |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for variant in VARIANTS:
        for policy in POLICIES:
            mine = select(runs, variant, policy)
            ttfts = [r.summary.ttft for r in mine if r.summary.ttft is not None]
            lines.append(
                f"| {variant.name} | {LABELS[policy]} | {mean([r.used for r in mine]):g} "
                f"| {mean([r.gpu_s for r in mine]):.2f} | {mean([r.last_finish_s for r in mine]):.2f} s "
                f"| {mean([t.mean_s for t in ttfts]):.2f} s | {mean([t.p99_s for t in ttfts]):.2f} s "
                f"| {mean([r.preemptions for r in mine]):g} |"
            )
    return "\n".join(lines)


def draw(runs: list[Run]) -> Figure:
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    cost, ttft = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _draw_cost(cost, runs, VARIANTS[0])
    _draw_ttft(ttft, runs, VARIANTS[0])
    figure.suptitle(
        f"{REQUESTS} requests in one instant on one cold prefix of {PREFIX_TOKENS:,} tokens, {REPLICAS} x {PROFILE}"
    )
    return figure


def _draw_cost(axes: Axes, runs: list[Run], variant: Variant) -> None:
    """What an even split over one to four replicas costs, and where each policy ends."""
    splits = [select(runs, variant, "round_robin", n) for n in range(1, REPLICAS + 1)]
    finish = [mean([r.last_finish_s for r in split]) for split in splits]
    gpu = [mean([r.gpu_s for r in split]) for split in splits]
    axes.plot(finish, gpu, color="#9aa3ae", marker="o", markersize=4, zorder=1)
    for n, x, y in zip(range(1, REPLICAS + 1), finish, gpu, strict=True):
        axes.annotate(f"on {n}", (x, y), textcoords="offset points", xytext=(0, -15), ha="center", color="#5d6672")
    sizes = {"e2": 15, "round_robin": 10, "least_load": 5, "e2_per_request": 10}
    for policy, size in sizes.items():
        mine = select(runs, variant, policy)
        point = mean([r.last_finish_s for r in mine]), mean([r.gpu_s for r in mine])
        axes.plot(*point, "o", color=COLOURS[policy], markersize=size, label=LABELS[policy], zorder=2)
    axes.set(
        title="What an even split costs", xlabel="last finish, seconds", ylabel="GPU seconds, all replicas together"
    )
    axes.set_xlim(0, None)
    axes.margins(y=0.18)
    axes.grid(alpha=0.3)
    axes.legend(markerscale=0.7)


def _draw_ttft(axes: Axes, runs: list[Run], variant: Variant) -> None:
    for i, policy in enumerate(POLICIES):
        times = [r.summary.ttft for r in select(runs, variant, policy) if r.summary.ttft is not None]
        for offset, values, alpha in (
            (-0.19, [t.mean_s for t in times], 1.0),
            (0.19, [t.p99_s for t in times], 0.45),
        ):
            axes.bar(i + offset, mean(values), 0.36, color=COLOURS[policy], alpha=alpha)
            axes.text(i + offset, mean(values), f"{mean(values):.1f}", ha="center", va="bottom")
    axes.set_xticks(range(len(POLICIES)), [LABELS[policy].replace(" without", "\nwithout") for policy in POLICIES])
    axes.set(title="Time to first token: mean (dark), p99 (light)", ylabel="seconds")
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.3)


def main() -> None:
    if not is_only_drawn(__doc__):
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_bytes(msgspec.json.encode(run_all()))
        note("burst")
    runs = msgspec.json.decode(RESULTS.read_bytes(), type=list[Run])
    print(table(runs))
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    draw(runs).savefig(FIGURE, metadata={"Date": None})
    print(f"burst: drawn to {FIGURE.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
