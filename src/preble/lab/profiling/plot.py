"""Measurements and their fit as a figure. Needs matplotlib: the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from preble.core.costs.model import CostModel
from preble.lab.profiling.fit import Fit, FittedTime
from preble.lab.report import draw_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_fit(fit: Fit, path: Path) -> None:
    """Draw prefill from nothing, prefill behind a cached prefix, and decoding, into a PNG at `path`.

    Raises: ConfigError: matplotlib is not installed. OSError: the file cannot be written.
    """
    draw_png(lambda figure: _fill(figure, fit), path)


def _fill(figure: Figure, fit: Fit) -> None:
    alone, behind, decode = figure.subplots(1, 3)
    model = CostModel(fit.profile)
    _draw_alone(alone, model, [t for t in fit.times if not t.num_sequences and not t.context_tokens])
    _draw_behind(behind, model, [t for t in fit.times if not t.num_sequences and t.context_tokens])
    _draw_decode(decode, model, [t for t in fit.times if t.num_sequences])
    figure.suptitle(f"{fit.profile.name}: measured (dots) and fitted (lines)")


def _draw_alone(axes: Axes, model: CostModel, times: Sequence[FittedTime]) -> None:
    axes.scatter([t.new_tokens for t in times], [t.measured_s * 1000 for t in times], zorder=3)
    lengths = sorted({1, *(n for n, _ in model.profile.prefill_points if n), *(t.new_tokens for t in times)})
    axes.plot(lengths, [model.prefill_s(n) * 1000 for n in lengths])
    axes.set(title="Prefill of a whole prompt", xlabel="tokens", ylabel="milliseconds", xscale="log", yscale="log")
    axes.grid(alpha=0.3)


def _draw_behind(axes: Axes, model: CostModel, times: Sequence[FittedTime]) -> None:
    axes.set(title="Prefill behind a cached prefix", xlabel="cached tokens", ylabel="milliseconds")
    axes.grid(alpha=0.3)
    if not times:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
        return
    longest = max(t.context_tokens for t in times)
    contexts = [longest * i / 50 for i in range(51)]
    for size in sorted({_size(t.new_tokens) for t in times}):
        mine = [t for t in times if _size(t.new_tokens) == size]
        shortest, longer = min(t.new_tokens for t in mine), max(t.new_tokens for t in mine)
        dots = axes.scatter([t.context_tokens for t in mine], [t.measured_s * 1000 for t in mine], zorder=3)
        line = [model.prefill_s((shortest + longer) // 2, round(context)) * 1000 for context in contexts]
        axes.plot(contexts, line, color=dots.get_facecolor()[0], label=f"{shortest} to {longer} new tokens")
    axes.set_yscale("log")
    axes.legend(fontsize="small")


def _size(tokens: int) -> int:
    """Group new-token counts that were meant to be equal: they differ because a cached prefix ends with a block."""
    return (tokens.bit_length() - 1) // 2


def _draw_decode(axes: Axes, model: CostModel, times: Sequence[FittedTime]) -> None:
    for batch in sorted({t.num_sequences for t in times}):
        mine = sorted((t for t in times if t.num_sequences == batch), key=lambda t: t.context_tokens)
        contexts = [t.context_tokens / batch for t in mine]
        dots = axes.scatter(contexts, [t.measured_s * 1000 for t in mine], zorder=3)
        fitted = [model.iteration_s((), batch, t.context_tokens) * 1000 for t in mine]
        axes.plot(contexts, fitted, color=dots.get_facecolor()[0], label=f"{batch} at once")
    axes.set(title="One decode iteration", xlabel="context of each sequence, tokens", ylabel="milliseconds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
