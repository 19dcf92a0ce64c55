"""Results as a figure. Needs matplotlib: the extra `plot`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from preble.lab.bench.run import BenchResult
from preble.lab.report import draw_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_results(results: Mapping[str, BenchResult], path: Path, title: str) -> None:
    """Draw TTFT and E2E of each run as cumulative distributions, and the tokens computed, into a PNG at `path`.

    Raises: ConfigError: matplotlib is not installed. OSError: the file cannot be written.
    """
    draw_png(lambda figure: _fill(figure, results, title), path)


def _fill(figure: Figure, results: Mapping[str, BenchResult], title: str) -> None:
    ttft, e2e, tokens = figure.subplots(1, 3)
    for name, result in results.items():
        good = [record for record in result.records if record.ok]
        _draw_cumulative(ttft, name, [r.ttft_s for r in good if r.ttft_s is not None])
        _draw_cumulative(e2e, name, [r.e2e_s for r in good])
    _label_times(ttft, "Time to first token")
    _label_times(e2e, "End-to-end latency")
    _draw_tokens(tokens, results)
    figure.suptitle(title)


def _draw_cumulative(axes: Axes, name: str, values: Sequence[float]) -> None:
    ordered = sorted(values)
    axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=name, drawstyle="steps-post")


def _label_times(axes: Axes, title: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set(title=title, xlabel="seconds", ylabel="share of requests", xscale="log", ylim=(0, 1.02))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")  # cumulative distributions never reach this corner


def _draw_tokens(axes: Axes, results: Mapping[str, BenchResult]) -> None:
    """Draw each run in the colour of its lines: full what was computed, pale what came from the cache."""
    from matplotlib.ticker import StrMethodFormatter

    for place, (name, result) in enumerate(results.items()):
        computed, cached = result.summary.recomputed_tokens or 0, result.summary.cached_tokens or 0
        axes.bar([name], [computed], color=f"C{place}")
        axes.bar([name], [cached], bottom=[computed], color=f"C{place}", alpha=0.35)
    axes.set(title="Prompt tokens (pale: from the cache)", ylabel="tokens")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
