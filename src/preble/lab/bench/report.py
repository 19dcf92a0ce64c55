"""Results for people: a table with one column per run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.console import Console

from preble.lab.bench.counters import total
from preble.lab.bench.run import BenchResult
from preble.lab.metrics.itl import Itl
from preble.lab.metrics.summary import Summary, TimeSummary
from preble.lab.report import Table, print_tables
from preble.lab.report.formats import seconds

FORMULAS = (
    "TTFT = first token - scheduled; E2E = end - scheduled; TPOT = (E2E - TTFT) / (output tokens - 1); "
    "ITL = gap between two tokens, every gap of every answer; "
    "hit rate = cached / prompt tokens, by the answers' usage"
)
ENGINE_HITS = "hits (engines)"
ENGINE_FORMULA = f"; {ENGINE_HITS}: by the engines' own counters"


def print_results(console: Console, results: Mapping[str, BenchResult], title: str = "") -> None:
    """Print a table: a row for each number that at least one run has, a column for each run, in order."""
    names = {name: f"{name} (partial)" if result.partial else name for name, result in results.items()}
    print_cells(console, {names[name]: _cells(result) for name, result in results.items()}, title)


def print_cells(console: Console, columns: Mapping[str, Mapping[str, str]], title: str = "") -> None:
    """Print a table from each run's label -> text, and below it what the labels mean.

    Its rows are the labels that any run has, in the first run's order.
    """
    labels = dict.fromkeys(label for cells in columns.values() for label in cells)
    rows = [[label, *(cells.get(label) or "-" for cells in columns.values())] for label in labels]
    print_tables(console, Table(["", *columns], [row for row in rows if {*row[1:]} != {"-"}], title))
    console.print(FORMULAS + (ENGINE_FORMULA if ENGINE_HITS in labels else ""), markup=False, highlight=False)


def summary_cells(summary: Summary) -> dict[str, str]:
    """Return the numbers of a run as text by label; "" for missing ones."""
    return {label: show(summary) for label, show in _ROWS}


def _cells(result: BenchResult) -> dict[str, str]:
    cells = summary_cells(result.summary)
    counters = total(result.engines)
    if result.engines:
        cells[ENGINE_HITS] = f"{counters.hit_tokens:,} of {counters.queried_tokens:,} ({counters.hit_rate:.1%})"
    return cells


def _time(metric: str, statistic: str) -> Callable[[Summary], str]:
    def show(summary: Summary) -> str:
        distribution: TimeSummary | Itl | None = getattr(summary, metric)
        return "" if distribution is None else seconds(getattr(distribution, statistic))

    return show


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


_ROWS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("requests (failed)", lambda s: f"{s.requests} ({s.errors})"),
    ("duration", lambda s: seconds(s.duration_s)),
    ("requests/s", lambda s: f"{s.requests_per_s:.2f}"),
    ("goodput, requests/s", lambda s: "" if s.goodput_per_s is None else f"{s.goodput_per_s:.2f}"),
    ("TTFT mean", _time("ttft", "mean_s")),
    ("TTFT p50", _time("ttft", "p50_s")),
    ("TTFT p99", _time("ttft", "p99_s")),
    ("TPOT mean", _time("tpot", "mean_s")),
    ("TPOT p99", _time("tpot", "p99_s")),
    ("ITL p50", _time("itl", "p50_s")),
    ("ITL p99", _time("itl", "p99_s")),
    ("ITL p99.9", _time("itl", "p999_s")),
    ("E2E mean", _time("e2e", "mean_s")),
    ("E2E p99", _time("e2e", "p99_s")),
    ("prompt tokens", lambda s: _count(s.prompt_tokens)),
    ("tokens computed", lambda s: _count(s.recomputed_tokens)),
    ("hit rate (usage)", lambda s: "" if s.hit_rate is None else f"{s.hit_rate:.1%}"),
    ("requests per replica", lambda s: " / ".join(str(count) for count in s.requests_per_replica.values())),
    ("sent late, p99", lambda s: seconds(s.lag_p99_s) if s.lag_p99_s else ""),
    ("failures", lambda s: ", ".join(f"{n} × {kind}" for kind, n in s.errors_by_kind.items())),
)
