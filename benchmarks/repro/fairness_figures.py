"""What fairness.py draws: an example of priority groups, the simulated case by utilisation, the case on replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from fairness_case import FULL, RUSH, Point, Results, Run, mid, select
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from preble.core.replica.waiting_queue import QueueOrder, WaitingQueue, group_of

FOLDER = Path(__file__).parents[2] / "docs" / "concepts" / "fairness"
COLOURS = {"fcfs": "#3d6fb6", "lpm": "#c8385a", "groups": "#0b6e4f", "hrrn": "#d98e04"}
STYLE = {"svg.hashsalt": "fairness"}
TITLES = {
    "emulator": "emulator",
    "vllm": "vLLM (CPU, tiny model)",
    "sglang": "SGLang (CPU, tiny model)",
}

NUM_TOKENS = 100
CACHED = {"h": 95, "p": 45, "m": 0}
"""Cached tokens of a hit, a part of a hit, a miss."""
KIND_COLOURS = {"h": "#8fd6b4", "p": "#f3c173", "m": "#ffffff"}
ARRIVALS = "hmhphhmhhphhhmhhhphhhhmh"
"""Who waits in the example, oldest first."""


def example_orders() -> dict[QueueOrder, list[int]]:
    """The arrival numbers of the example, from 1, as core's own queue serves them."""
    cached = {str(number): CACHED[kind] for number, kind in enumerate(ARRIVALS, 1)}
    served = {}
    for order in QueueOrder:
        queue = WaitingQueue(cached.__getitem__, order)
        for item in cached:
            queue.add(item, NUM_TOKENS)
        queue.refresh()
        served[order] = [int(item) for item in queue.in_order()]
    return served


def draw_example() -> Figure:
    orders = example_orders()
    figure = Figure(figsize=(10, 2.3), layout="constrained")
    axes = figure.subplots()
    for row, (order, numbers) in enumerate(orders.items()):
        axes.text(-0.3, -row, order, ha="right", va="center", fontweight="bold", color=COLOURS[order])
        for place, number in enumerate(numbers):
            _draw_request(axes, place, -row, number)
    axes.set(xlim=(-2.6, len(ARRIVALS)), ylim=(-len(orders) + 0.4, 0.6))
    axes.axis("off")
    handles = [
        Patch(facecolor=KIND_COLOURS[kind], edgecolor="#1d2430", label=f"{cached} % cached: group {_group(kind)}")
        for kind, cached in CACHED.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(
        f"The same {len(ARRIVALS)} waiting requests in each order, next one on the left; numbers: order of arrival"
    )
    return figure


def _draw_request(axes: Axes, x: float, y: float, number: int) -> None:
    colour = KIND_COLOURS[ARRIVALS[number - 1]]
    axes.add_patch(Rectangle((x, y - 0.4), 0.9, 0.8, facecolor=colour, edgecolor="#1d2430", linewidth=0.8))
    axes.text(x + 0.45, y, str(number), ha="center", va="center", fontsize=8)


def _group(kind: str) -> int:
    return group_of(CACHED[kind], NUM_TOKENS, 10)


def draw_simulated(results: Results) -> Figure:
    """Hits and misses by utilisation: median and p99, and whose the time is."""
    points = sorted({run.point for run in results.runs if run.point.misses == FULL.misses}, key=_utilisation)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    hits, misses, share = figure.subplots(1, 3)
    misses.sharey(hits)
    for order in QueueOrder:
        runs = [select(results, order, point) for point in points]
        _draw_times(hits, points, order, [mid(r, hits_p50) for r in runs], [mid(r, hits_p99) for r in runs])
        _draw_times(misses, points, order, [mid(r, misses_p50) for r in runs], [mid(r, misses_p99) for r in runs])
        shares = [100 * mid(r, share_of_misses) for r in runs]
        share.plot([100 * p.utilisation for p in points], shares, "o-", color=COLOURS[order], label=order)
    hits.set(title="hits (95 %)", yscale="log", ylabel="TTFT, seconds: median solid, p99 dashed")
    misses.set(title="misses (5 %)", yscale="log")
    share.set(title="misses' share of all TTFT", ylim=(0, None), ylabel="%")
    for axes in (hits, misses, share):
        axes.set_xlabel("utilisation, %")
        axes.grid(alpha=0.3)
    share.legend()
    figure.suptitle(f"Simulated: one a6000-mistral-7b, {results.case.requests} requests, medians over five seeds")
    return figure


def _draw_times(axes: Axes, points: Sequence[Point], order: str, p50: list[float], p99: list[float]) -> None:
    utilisation = [100 * point.utilisation for point in points]
    axes.plot(utilisation, p50, "o-", color=COLOURS[order])
    axes.plot(utilisation, p99, "o--", color=COLOURS[order])


def draw_replicas(measured: Mapping[str, Results]) -> Figure:
    """One panel for each engine: medians over the rounds as bars, each round as a dot."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, len(measured), squeeze=False)[0]
    for axes, (engine, results) in zip(panels, measured.items(), strict=True):
        _draw_engine(axes, results)
        axes.set(title=TITLES[engine], yscale="log")
    panels[0].set_ylabel("TTFT, seconds")
    figure.suptitle(
        "On replicas: 95 % hits, 5 % misses, 10 % more than capacity; bars: medians over the rounds, dots: rounds"
    )
    return figure


def _draw_engine(axes: Axes, results: Results) -> None:
    orders = list(
        dict.fromkeys(run.order for run in sorted(results.runs, key=lambda run: list(COLOURS).index(run.order)))
    )
    width = 0.8 / len(orders)
    for i, order in enumerate(orders):
        runs = select(results, order, RUSH)
        for group, value in enumerate((hits_p50, hits_p99, misses_p50, misses_p99)):
            x = group + (i - (len(orders) - 1) / 2) * width
            axes.bar(x, mid(runs, value), width * 0.92, color=COLOURS[order], label=order if group == 0 else None)
            axes.plot([x] * len(runs), [value(run) for run in runs], ".", color="#1d2430", markersize=3)
    axes.set_xticks(range(4), ["hits\nmedian", "hits\np99", "misses\nmedian", "misses\np99"])
    axes.grid(axis="y", alpha=0.3)
    axes.legend()


def hits_p50(run: Run) -> float:
    return run.hits.ttft.p50_s


def hits_p99(run: Run) -> float:
    return run.hits.ttft.p99_s


def misses_p50(run: Run) -> float:
    return run.misses.ttft.p50_s


def misses_p99(run: Run) -> float:
    return run.misses.ttft.p99_s


def share_of_misses(run: Run) -> float:
    return run.share_of_misses


def _utilisation(point: Point) -> float:
    return point.utilisation


def draw_all(measured: Mapping[str, Results]) -> Iterator[Path]:
    """Draw what there are results for; gives each file."""
    replicas = {engine: results for engine, results in measured.items() if engine in TITLES}
    yield _save(draw_example(), "example")
    if "simulator" in measured:
        yield _save(draw_simulated(measured["simulator"]), "simulated")
    if replicas:
        yield _save(draw_replicas(replicas), "replicas")


def _save(figure: Figure, name: str) -> Path:
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.svg"
    metadata: dict[str, Any] = {"Date": None}
    with mpl.rc_context(STYLE):
        figure.savefig(path, metadata=metadata)
    return path
