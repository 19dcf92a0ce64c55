"""A hot prefix that exceeds one replica for a while: what redirects, replication and retirement do, as a timeline.

    python benchmarks/repro/hot_prefix.py             # simulate, write the results, draw
    python benchmarks/repro/hot_prefix.py --draw      # draw from the results that are there

Tool use by Zipf 1.1 over 24 tools on 4 simulated replicas: calm, then a load under which the most popular tool alone is
more than one replica bears, then little. Results: benchmarks/results/hot_prefix.json. Figure:
docs/concepts/rebalancing/hot_prefix.svg. Needs the extra `plot` to draw.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from math import nan
from pathlib import Path

import msgspec
from made_by import note
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from page import is_only_drawn

from preble.lab.metrics import RequestRecord
from preble.lab.metrics.summary import TimeSummary, distribution
from preble.lab.sim import SimConfig, SimResult, simulate
from preble.lab.sim.result import ReplicationRecord, ReplicaTotals
from preble.lab.sim.timeline import ReplicaSeries
from preble.lab.workloads import Segment, Workload, WorkloadRequest
from preble.lab.workloads.popularity import Zipf
from preble.lab.workloads.trace import made_up_tokens
from preble.profiles import load_profile

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "hot_prefix.json"
FIGURE = ROOT / "docs" / "concepts" / "rebalancing" / "hot_prefix.svg"
PROFILE, REPLICAS, KV_TOKENS, SEED = "a6000-mistral-7b", 4, 60_000, 0
PHASES = ((120.0, 12.0), (240.0, 68.0), (300.0, 6.0))
"""(seconds, requests a second)"""
NUM_TOOLS, ZIPF, SYSTEM_TOKENS, TAIL_TOKENS, OUTPUT_TOKENS = 24, 1.1, 100, (120, 280), (20, 66)
BIN_S = 10.0


class Arm(msgspec.Struct, frozen=True):
    """One policy with its switches."""

    name: str
    policy: str
    colour: str
    window_s: float = 180.0


ARMS = (
    Arm("e2", "e2", "#0b6e4f"),
    Arm("e2 without replication", "e2?replicate=false", "#d98e04"),
    Arm("e2 without rebalancing", "e2_per_request", "#c8385a"),
    Arm("round robin", "round_robin", "#3d6fb6"),
    Arm("least load", "least_load", "#8a93a0"),
    Arm("e2, load of the last 20 s", "e2", "#7a4fa3", window_s=20.0),
)
REPLICA_COLOURS = ("#8ecbf0", "#f3c173", "#8fd6b4", "#d3a6d8")


class Bin(msgspec.Struct):
    """What was asked in `BIN_S` seconds. `hot`: requests for the hot tool by replica. TTFT in seconds."""

    time_s: float
    requests: int
    redirects: int
    hot: dict[str, int]
    ttft: TimeSummary | None


class ArmResult(msgspec.Struct):
    """One simulation. `busy`: TTFT in the phase of high load; `after`: in the one of little."""

    name: str
    gpu_s: float
    hit_rate: float | None
    busy: TimeSummary | None
    after: TimeSummary | None
    e2e: TimeSummary | None
    reasons: dict[str, int]
    replications: list[ReplicationRecord]
    replicas: dict[str, ReplicaTotals]
    timeline: dict[str, ReplicaSeries]
    bins: list[Bin]


def tool_tokens(rank: int) -> int:
    """Each tool's documentation has a length of its own, so that a prefix is known by its length; no order by rank."""
    return 1600 + 8 * (rank * 7 % NUM_TOOLS)


def workload() -> tuple[Workload, dict[str, int]]:
    """The requests, and the rank of the tool that each asks for."""
    rng = random.Random(f"hot prefix/{SEED}")
    popularity = Zipf(NUM_TOOLS, ZIPF)
    system = Segment("system", tokens=made_up_tokens("system", SYSTEM_TOKENS))
    tools = [Segment(f"tool {i}", tokens=made_up_tokens(f"tool {i}", tool_tokens(i))) for i in range(NUM_TOOLS)]
    ranks: dict[str, int] = {}

    def requests() -> Iterator[WorkloadRequest]:
        for time_s in arrivals(rng):
            rank = popularity.pick(rng)
            request_id = f"q{len(ranks)}"
            ranks[request_id] = rank
            question = Segment(tokens=made_up_tokens(f"question {request_id}", rng.randint(*TAIL_TOKENS)))
            prompt = (system, tools[rank], question)
            yield WorkloadRequest(request_id, prompt, rng.randint(*OUTPUT_TOKENS), arrival_s=time_s)

    return Workload("hot_prefix", tuple(requests())), ranks


def arrivals(rng: random.Random) -> Iterator[float]:
    """Poisson arrivals at the rate of each phase."""
    start = 0.0
    for duration_s, rps in PHASES:
        time_s = start + rng.expovariate(rps)
        while time_s < start + duration_s:
            yield time_s
            time_s += rng.expovariate(rps)
        start += duration_s


def run(arm: Arm) -> ArmResult:
    asked, ranks = workload()
    config = SimConfig(
        profile=load_profile(PROFILE),
        replicas=REPLICAS,
        policy=arm.policy,
        kv_tokens=KV_TOKENS,
        seed=SEED,
        window_s=arm.window_s,
        sample_s=2.0,
    )
    return condense(arm, simulate(config, asked), ranks)


def condense(arm: Arm, result: SimResult, ranks: dict[str, int]) -> ArmResult:
    calm_s, busy_s = PHASES[0][0], PHASES[0][0] + PHASES[1][0]
    return ArmResult(
        name=arm.name,
        gpu_s=result.gpu_s,
        hit_rate=result.summary.hit_rate,
        busy=ttft([r for r in result.records if calm_s <= r.scheduled_s < busy_s]),
        after=ttft([r for r in result.records if r.scheduled_s >= busy_s]),
        e2e=result.summary.e2e,
        reasons=result.reasons,
        replications=result.replications,
        replicas=result.replicas,
        timeline=result.timeline,
        bins=binned(result.records, ranks),
    )


def ttft(records: Sequence[RequestRecord]) -> TimeSummary | None:
    return distribution([r.ttft_s for r in records if r.ttft_s is not None])


def binned(records: Sequence[RequestRecord], ranks: dict[str, int]) -> list[Bin]:
    bins = []
    for i in range(round(sum(duration_s for duration_s, _ in PHASES) / BIN_S)):
        inside = [r for r in records if i * BIN_S <= r.scheduled_s < (i + 1) * BIN_S]
        hot = Counter(r.replica for r in inside if ranks[r.request_id] == 0 and r.replica is not None)
        redirects = sum(r.reason == "redirect" for r in inside)
        bins.append(Bin(i * BIN_S, len(inside), redirects, dict(sorted(hot.items())), ttft(inside)))
    return bins


def table(results: Sequence[ArmResult]) -> str:
    """As a Markdown table."""
    lines = [
        "| arm | TTFT under load, mean | p99 | TTFT after it, mean | E2E mean | p99 | hit rate | GPU seconds "
        "| redirects | replicated | retired |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        assert r.busy and r.after and r.e2e and r.hit_rate is not None
        seconds = (r.busy.mean_s, r.busy.p99_s, r.after.mean_s, r.e2e.mean_s, r.e2e.p99_s)
        times = " | ".join(f"{value:.2f} s" for value in seconds)
        counts = (
            r.reasons.get("redirect", 0),
            sum(h.added for h in r.replications),
            sum(not h.added for h in r.replications),
        )
        lines.append(f"| {r.name} | {times} | {r.hit_rate:.1%} | {r.gpu_s:.0f} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def draw(results: Sequence[ArmResult]) -> Figure:
    figure = Figure(figsize=(11, 11), layout="constrained")
    share, waiting, latency, p99 = figure.subplots(4, 1, sharex=True, height_ratios=(1.15, 1, 1, 1))
    _draw_share(share, results[0])
    _draw_waiting(waiting, results[0])
    _draw_latency(latency, results, "mean_s", "mean TTFT of what was asked then, every arm")
    _draw_latency(p99, results, "p99_s", "p99 TTFT of what was asked then, every arm")
    handles, labels = latency.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    p99.set_xlabel("seconds")
    p99.set_xlim(0, sum(duration_s for duration_s, _ in PHASES))
    rates = ", then ".join(f"{rps:g}" for _, rps in PHASES)
    figure.suptitle(
        f"One hot prefix, {rates} requests/s on {REPLICAS} x {PROFILE} (Zipf {ZIPF} over {NUM_TOOLS} tools)"
    )
    return figure


def _draw_share(axes: Axes, e2: ArmResult) -> None:
    """Who serves the hot prefix, and what was done about it."""
    times = [b.time_s + BIN_S / 2 for b in e2.bins]
    names = sorted(e2.timeline)
    totals = [sum(b.hot.values()) or 1 for b in e2.bins]
    shares = [[b.hot.get(name, 0) / total for b, total in zip(e2.bins, totals, strict=True)] for name in names]
    axes.stackplot(times, *shares, labels=names, colors=REPLICA_COLOURS)
    axes.set(title="e2: share of the hot prefix's requests by replica; above it, what was done", ylim=(0, 1.42))
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    hot_tokens = SYSTEM_TOKENS + tool_tokens(0)
    rows: tuple[tuple[str, list[float], str, str], ...] = (
        ("redirect, any prefix", [b.time_s + BIN_S / 2 for b in e2.bins if b.redirects], "x", "#1d2430"),
        ("replicated, any prefix", [h.time_s for h in e2.replications if h.added], "^", "#0b6e4f"),
        ("retired, any prefix", [h.time_s for h in e2.replications if not h.added], "v", "#c8385a"),
    )
    for i, (label, at, marker, colour) in enumerate(rows):
        axes.plot(at, [1.34 - 0.12 * i] * len(at), marker, color=colour, markersize=6, label=label, alpha=0.55)
    for home in e2.replications:
        if home.prefix_tokens == hot_tokens:
            y = 1.22 if home.added else 1.10
            axes.plot(home.time_s, y, "^" if home.added else "v", markersize=11, mfc="none", mec="#1d2430")
    axes.plot([], [], "^", markersize=11, mfc="none", mec="#1d2430", label="the hot prefix")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _draw_waiting(axes: Axes, e2: ArmResult) -> None:
    for (name, series), colour in zip(sorted(e2.timeline.items()), REPLICA_COLOURS, strict=True):
        in_flight = [w + r for w, r in zip(series.waiting, series.running, strict=True)]
        axes.plot(series.time_s, in_flight, color=colour, label=name, linewidth=1.6)
    axes.set(title="e2: requests on each replica", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _draw_latency(axes: Axes, results: Sequence[ArmResult], statistic: str, title: str) -> None:
    for arm, result in zip(ARMS, results, strict=True):
        values = [getattr(b.ttft, statistic) if b.ttft is not None else nan for b in result.bins]
        width = 2.4 if arm is ARMS[0] else 1.3
        axes.plot(
            [b.time_s + BIN_S / 2 for b in result.bins], values, color=arm.colour, linewidth=width, label=arm.name
        )
    axes.set(title=title, yscale="log", ylabel="seconds")
    axes.grid(alpha=0.3)


def main() -> None:
    if not is_only_drawn(__doc__):
        results = []
        for arm in ARMS:
            print(f"hot_prefix: {arm.name}", file=sys.stderr)
            results.append(run(arm))
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_bytes(msgspec.json.encode(results))
        note("hot_prefix")
    results = msgspec.json.decode(RESULTS.read_bytes(), type=list[ArmResult])
    print(table(results))
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    draw(results).savefig(FIGURE, metadata={"Date": None})
    print(f"hot_prefix: drawn to {FIGURE.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
