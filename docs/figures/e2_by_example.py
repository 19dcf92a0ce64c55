"""Draw the figures of docs/concepts/e2-by-example.md from what the real scheduler does: one SVG a placement.

    python docs/figures/e2_by_example.py            # into docs/concepts/e2-by-example/
    python docs/figures/e2_by_example.py DIR        # elsewhere
    python docs/figures/e2_by_example.py DIR png    # in another format that matplotlib knows

Each file carries the data that it shows as JSON in its description, so that a test can check that it is up to date.
Needs the extra `plot`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from e2_scenario import REPLICAS, Part, Step, TreeNode, run
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

FOLDER = Path(__file__).parents[1] / "concepts" / "e2-by-example"
REPLICA_COLOURS = dict(zip(REPLICAS, ("#8ecbf0", "#f3c173", "#8fd6b4"), strict=True))
COST_COLOURS = {"L": "#59667a", "M": "#c8385a", "P": "#b9c0ca"}
COST_WORDS = {"L": "L load", "M": "M eviction", "P": "P prefill"}
INK, FAINT, CACHED, MISSED = "#1d2430", "#8a93a0", "#d9dee5", "#ffffff"
WIDTH_IN, TITLE_IN, LEGEND_IN, GAP_IN, ROW_IN, BAR_IN = 7.6, 0.38, 0.3, 0.15, 0.44, 0.36
ROWS_ABOVE = 1.7
"""What the request takes above the first row of the tree."""
LABEL: dict[str, Any] = {"fontsize": 8, "color": INK, "ha": "center", "va": "center", "linespacing": 1.05, "zorder": 4}


@dataclass(frozen=True, slots=True)
class Row:
    """Where a tree node is drawn: rows `top` up to `bottom`, counted downwards from 0."""

    node: TreeNode
    top: int
    bottom: int


def draw(step: Step, note: str = "") -> Figure:
    """The request, below it the tree that it found, and below that what each replica would cost.

    `note`: put behind the title.
    """
    rows = list(layout(step.tree))
    num_rows = max((row.bottom for row in rows), default=1)
    tree_in, costs_in = (ROWS_ABOVE + num_rows) * ROW_IN, len(REPLICAS) * BAR_IN
    height_in = TITLE_IN + tree_in + LEGEND_IN + GAP_IN + costs_in + LEGEND_IN
    figure = Figure(figsize=(WIDTH_IN, height_in), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.012, 1 - 0.2 / height_in, title(step) + note, fontsize=12, fontweight="bold", color=INK, va="center")
    tree_bottom_in = height_in - TITLE_IN - tree_in
    tree_axes = figure.add_axes((0.01, tree_bottom_in / height_in, 0.98, tree_in / height_in))
    cost_axes = figure.add_axes((0.05, LEGEND_IN / height_in, 0.94, costs_in / height_in))
    draw_tree(tree_axes, step, rows, num_rows)
    draw_costs(cost_axes, step)
    return figure


def title(step: Step) -> str:
    return f"{step.ask.name}   t = {step.ask.at:.0f} s   {step.placement.reason} → {step.placement.replica_id}"


def layout(nodes: tuple[TreeNode, ...], top: int = 0) -> Iterator[Row]:
    """One row a leaf; a node above spans the rows of what is below it."""
    for node in nodes:
        below = list(layout(node.children, top))
        bottom = max((row.bottom for row in below), default=top + 1)
        yield Row(node, top, bottom)
        yield from below
        top = bottom


def draw_tree(axes: Axes, step: Step, rows: list[Row], num_rows: int) -> None:
    """The request, then the tree under it; to the right is later in the prompt, to one scale."""
    width = max([step.placement.num_prompt_tokens, *(row.node.start + row.node.num_tokens for row in rows)])
    axes.set_xlim(-0.005 * width, 1.005 * width)
    axes.set_ylim(num_rows, -ROWS_ABOVE)
    axes.axis("off")
    draw_request(axes, step)
    for row in rows:
        draw_node(axes, row, inset=0.005 * width)
    if not rows:
        axes.text(0, 0.5, "the prefix tree is empty", color=FAINT, fontsize=9, style="italic", va="center")
    handles = [Patch(facecolor=colour, label=f"held by {name}") for name, colour in REPLICA_COLOURS.items()]
    handles.append(Patch(facecolor="white", edgecolor=FAINT, linestyle=":", label="held by nobody"))
    handles.append(Patch(facecolor="white", edgecolor=INK, linewidth=1.8, label="matched by the request"))
    legend(axes, handles, num_columns=5)


def draw_request(axes: Axes, step: Step) -> None:
    """The prompt as a bar: what is cached somewhere, then what no replica has."""
    top, bottom = -1.2, -0.3
    spans = [(0, step.cached_tokens, "cached", CACHED), (step.cached_tokens, step.missed_tokens, "missed", MISSED)]
    for start, tokens, word, colour in spans:
        if tokens:
            axes.add_patch(Rectangle((start, top), tokens, bottom - top, facecolor=colour))
            axes.text(start + tokens / 2, top - 0.22, f"{word} {tokens:,}", **LABEL)
    outline(axes, Rectangle((0, top), step.placement.num_prompt_tokens, bottom - top), INK, 1.2)
    draw_parts(axes, 0, step.ask.parts, top, bottom)


def draw_node(axes: Axes, row: Row, inset: float) -> None:
    """A box from the node's first token to its last; one band a holder, as long as what it holds.

    `inset`: of the holder's letter from the left edge, in tokens.
    """
    node, top, height = row.node, row.top + 0.04, row.bottom - row.top - 0.08
    band = height / max(1, len(node.held))
    for i, replica_id in enumerate(name for name in REPLICAS if name in node.held):
        corner = (node.start, top + i * band)
        axes.add_patch(Rectangle(corner, node.held[replica_id], band, facecolor=REPLICA_COLOURS[replica_id]))
        axes.text(corner[0] + inset, corner[1] + 0.05, replica_id, fontsize=6, color=INK, va="top", zorder=4)
    whole = max(node.held.values(), default=0) == node.num_tokens
    outline(axes, Rectangle((node.start, top), node.num_tokens, height), FAINT, 0.8, "-" if whole else ":")
    if node.matched_tokens:
        outline(axes, Rectangle((node.start, top), node.matched_tokens, height), INK, 2.0)
    draw_parts(axes, node.start, node.parts, top, top + height)


def outline(axes: Axes, box: Rectangle, colour: str, width: float, style: str = "-") -> None:
    box.set(fill=False, edgecolor=colour, linewidth=width, linestyle=style, zorder=3)
    axes.add_patch(box)


def draw_parts(axes: Axes, start: int, parts: tuple[Part, ...], top: float, bottom: float) -> None:
    """Names and sizes of consecutive parts, with a thin line between them."""
    for i, part in enumerate(parts):
        if i:
            axes.plot([start, start], [top, bottom], color=FAINT, linewidth=0.7)
        label = f"{part.name}\n{part.num_tokens:,}"
        axes.text(start + part.num_tokens / 2, (top + bottom) / 2, label, **LABEL)
        start += part.num_tokens


def draw_costs(axes: Axes, step: Step) -> None:
    """A stacked bar L + M + P for every replica that was weighed."""
    candidates = {candidate.replica_id: candidate for candidate in step.placement.candidates}
    longest = max(candidate.cost_s for candidate in candidates.values())
    axes.set_xlim(0, longest * 1.22)
    axes.set_ylim(len(REPLICAS) - 0.5, -0.5)
    axes.axis("off")
    for y, replica_id in enumerate(REPLICAS):
        box = {"boxstyle": "round,pad=0.25", "facecolor": REPLICA_COLOURS[replica_id], "edgecolor": "none"}
        axes.text(
            -0.02 * longest, y, replica_id, fontsize=9, ha="right", va="center", fontweight="bold", color=INK, bbox=box
        )
        if replica_id not in candidates:
            axes.text(0, y, "not weighed", color=FAINT, fontsize=9, style="italic", va="center")
            continue
        candidate = candidates[replica_id]
        costs = {"L": candidate.load_s, "M": candidate.eviction_s, "P": candidate.prefill_s}
        draw_bar(axes, y, costs, longest, chosen=replica_id == step.placement.replica_id)
    legend(axes, [Patch(facecolor=COST_COLOURS[key], label=COST_WORDS[key]) for key in COST_COLOURS], num_columns=3)


def draw_bar(axes: Axes, y: int, costs: dict[str, float], longest: float, *, chosen: bool) -> None:
    left = 0.0
    for key, seconds in costs.items():
        axes.barh(y, seconds, left=left, height=0.64, color=COST_COLOURS[key], edgecolor="white", linewidth=0.8)
        if seconds > 0.04 * longest:
            colour = INK if key == "P" else "white"
            axes.text(left + seconds / 2, y, f"{seconds:.1f}", color=colour, fontsize=8, ha="center", va="center")
        left += seconds
    if chosen:
        outline(axes, Rectangle((0, y - 0.32), left, 0.64), INK, 2.2)
    words = f"{left:.1f} s" + ("  ◀ chosen" if chosen else "")
    weight = "bold" if chosen else "normal"
    axes.text(left + 0.015 * longest, y, words, fontsize=9.5, fontweight=weight, color=INK, va="center")


def legend(axes: Axes, handles: list[Patch], num_columns: int) -> None:
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.0, 0.0),
        bbox_transform=axes.transAxes,
        ncols=num_columns,
        fontsize=8,
        frameon=False,
        handlelength=1.2,
        handleheight=0.9,
        columnspacing=1.2,
        borderaxespad=0.4,
        borderpad=0.0,
    )


def figures() -> Iterator[tuple[str, Step, str]]:
    """Name of the file, what it shows, note for the title. `r7-unreported`: had A not reported its evictions."""
    for name, step in run().items():
        yield name, step, ""
    yield "r7-unreported", run(report_evictions=False)["r7"], "   (had A not reported what it evicted)"


def save(folder: Path, name: str, step: Step, note: str = "", suffix: str = "svg") -> None:
    """Write one figure. The same bytes again for the same data and the same matplotlib."""
    svg = suffix == "svg"
    metadata = {"Date": None, "Creator": None, "Description": json.dumps(step.data(), sort_keys=True)} if svg else None
    with mpl.rc_context({"svg.hashsalt": "preble", "font.family": "DejaVu Sans"}):
        draw(step, note).savefig(folder / f"{name}.{suffix}", metadata=metadata, dpi=110)


def main(folder: Path = FOLDER, suffix: str = "svg") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, step, note in figures():
        save(folder, name, step, note, suffix)


if __name__ == "__main__":
    main(*(kind(argument) for kind, argument in zip((Path, str), sys.argv[1:], strict=False)))
