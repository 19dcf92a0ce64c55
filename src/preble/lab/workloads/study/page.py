"""Studies side by side as one HTML page, with the cumulative distributions drawn. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from preble.lab.report import PALETTE, Drawing, Section, Table, Text, draw, html_page
from preble.lab.report.page import Part
from preble.lab.workloads.study.metrics import GAP, METRICS, Metric
from preble.lab.workloads.study.study import Study, StudyReport
from preble.lab.workloads.study.tables import (
    arrivals_table,
    cache_table,
    labels,
    percentiles_table,
    prompts_table,
    sessions_table,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFINITIONS = (
    "Shared prefix in prompt: tokens that an earlier prompt began with / tokens of the prompt, in the order of the "
    "requests, by a prefix tree that forgets nothing.\n"
    "Key portion: the deepest node on a prompt's path in that tree with more tokens than all the nodes before it "
    "together. Requests per key portion: how many have the same node as theirs, over the nodes."
)
CACHE = (
    "Best hit rate: all tokens that an earlier prompt began with / all prompt tokens: no prefix cache saves more. "
    "Distinct tokens: what it takes to keep them all. Mostly shared: requests with more of their prompt shared than "
    "not: these E2 sends where their prefix is."
)
ARRIVALS = "Requests that wait for another one's answer have no time of their own and are not among these."
WORDS = "Its prompts are text; their tokens are counted so: {}."
LEGEND_CHARS = 52
"""Characters in one row of a legend."""

_LINES = ("-", "--", ":")
_SHARES = tuple(percent / 100 for percent in range(101))


def study_page(report: StudyReport, *, made: str = "") -> str:
    """Return the page. `made`: when and by which command.

    Raises: ConfigError: matplotlib is not installed.
    """
    studies = report.studies
    sections = [
        Section("Prompts and what they share", [Text(DEFINITIONS), prompts_table(studies)]),
        Section("What a cache can save", [Text(CACHE), cache_table(studies)]),
        Section("Distributions", [draw_cdf(m, studies) for m in METRICS if m is not GAP and any(map(m.of, studies))]),
        Section("Arrivals", list(_arrivals(studies))),
        Section("Sessions", _present(sessions_table(studies))),
        Section("Percentiles", [table for m in METRICS for table in _present(percentiles_table(m, studies))]),
        Section("Where they come from", list(_origins(report))),
    ]
    subtitle = f"Made by preble workload study, Preble {report.version}"
    title = f"Workload study: {', '.join(labels(studies))}"
    return html_page(title, [section for section in sections if section.parts], subtitle=subtitle, made=made)


def draw_cdf(metric: Metric, studies: Sequence[Study]) -> Drawing:
    """Return the cumulative distribution of one metric, a line for each workload that has it.

    A workload's colour depends only on its place in `studies`, so that it is the same in every drawing.
    """
    spreads = [(place, _shown(label), metric.of(study)) for place, (label, study) in enumerate(_named(studies))]

    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        for place, label, spread in spreads:
            if spread is not None:
                axes.plot(spread.percentiles, _SHARES, label=label, drawstyle="steps-post", **_line(place))
        _set_axes(axes, metric, [value for *_, spread in spreads if spread for value in spread.percentiles])
        if len(spreads) > 1:
            longest = max(len(label) for _, label, _ in spreads)
            figure.legend(loc="outside upper center", ncols=max(1, min(3, LEGEND_CHARS // (longest + 4))))

    return draw(fill)


def _shown(label: str) -> str:
    """Escape the label for matplotlib, which hides a leading _ and reads mathematics between $."""
    return ("\u200b" if label.startswith("_") else "") + label.replace("$", r"\$")


def _line(place: int) -> dict[str, Any]:
    """Return the line style of the workload at this place."""
    return {"color": PALETTE[place % len(PALETTE)], "linestyle": _LINES[place // len(PALETTE) % len(_LINES)]}


def _set_axes(axes: Axes, metric: Metric, values: Sequence[float]) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, PercentFormatter, StrMethodFormatter

    name = metric.name + (" (tokens)" if metric.unit == "tokens" else "")
    axes.set(xlabel=name[0].upper() + name[1:], ylabel="Share, cumulative", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    positive = [value for value in values if value > 0]
    if metric.is_share:
        axes.set_xlim(0, 1.02)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    elif positive:
        within_two_decades = max(positive) < 100 * min(positive)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if within_two_decades else (1,), numticks=6))
        axes.xaxis.set_minor_formatter(NullFormatter())
        unit = "s" if metric.unit == "s" else ""
        axes.xaxis.set_major_formatter(EngFormatter(unit) if metric.unit else StrMethodFormatter("{x:,g}"))


def _arrivals(studies: Sequence[Study]) -> Iterator[Part]:
    table = arrivals_table(studies)
    if table is not None:
        yield from (Text(ARRIVALS), table, draw_cdf(GAP, studies))


def _origins(report: StudyReport) -> Iterator[Text]:
    for source, (label, study) in zip(report.sources, _named(report.studies), strict=True):
        words = WORDS.format(report.tokenizer or "a word is a token") if study.has_text else ""
        yield Text(f"{label} ({source}): {study.note or 'no note'}\n{words}".rstrip())
    yield Text(f"Seed of named workloads: {report.seed}.")


def _named(studies: Sequence[Study]) -> Iterator[tuple[str, Study]]:
    return zip(labels(studies), studies, strict=True)


def _present(table: Table | None) -> list[Part]:
    return [] if table is None else [table]
