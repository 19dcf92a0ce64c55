"""Results for people: a table, one column a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.table import Table

from preble.bench.counters import total
from preble.bench.run import BenchResult
from preble.metrics.summary import Distribution

FORMULAS = (
    "TTFT = first token - scheduled; E2E = end - scheduled; TPOT = (E2E - TTFT) / (output tokens - 1);\n"
    "hit rate = cached / prompt tokens, by the answers' usage; hits (engines): by the engines' own counters"
)


def results_table(results: Mapping[str, BenchResult], title: str = "") -> Table:
    """A table with a row for each number that at least one run has, and a column for each run, in their order."""
    table = Table(title=title or None, caption=FORMULAS, caption_justify="left")
    table.add_column("")
    for name, result in results.items():
        table.add_column(f"{name} (partial)" if result.partial else name, justify="right")
    for label, show in _ROWS:
        cells = [show(result) for result in results.values()]
        if any(cells):
            table.add_row(label, *(cell or "-" for cell in cells))
    return table


def seconds(value: float) -> str:
    """
    >>> seconds(0.0421), seconds(12.34)
    ('42.1 ms', '12.34 s')
    """
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _time(metric: str, statistic: str) -> Callable[[BenchResult], str]:
    def show(result: BenchResult) -> str:
        distribution: Distribution | None = getattr(result.summary, metric)
        return "" if distribution is None else seconds(getattr(distribution, statistic))

    return show


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _engine_hits(result: BenchResult) -> str:
    counters = total(result.engines)
    return f"{counters.hit_tokens:,} of {counters.queried_tokens:,} ({counters.hit_rate:.1%})" if result.engines else ""


def _per_replica(result: BenchResult) -> str:
    return " / ".join(str(count) for count in result.summary.requests_per_replica.values())


_ROWS: tuple[tuple[str, Callable[[BenchResult], str]], ...] = (
    ("requests (failed)", lambda r: f"{r.summary.requests} ({r.summary.errors})"),
    ("duration", lambda r: seconds(r.summary.duration_s)),
    ("requests/s", lambda r: f"{r.summary.requests_per_s:.2f}"),
    ("goodput, requests/s", lambda r: "" if r.summary.goodput_per_s is None else f"{r.summary.goodput_per_s:.2f}"),
    ("TTFT mean", _time("ttft", "mean_s")),
    ("TTFT p50", _time("ttft", "p50_s")),
    ("TTFT p99", _time("ttft", "p99_s")),
    ("TPOT mean", _time("tpot", "mean_s")),
    ("TPOT p99", _time("tpot", "p99_s")),
    ("E2E mean", _time("e2e", "mean_s")),
    ("E2E p99", _time("e2e", "p99_s")),
    ("prompt tokens", lambda r: _count(r.summary.prompt_tokens)),
    ("tokens computed", lambda r: _count(r.summary.recomputed_tokens)),
    ("hit rate (usage)", lambda r: _rate(r.summary.hit_rate)),
    ("hits (engines)", _engine_hits),
    ("requests per replica", _per_replica),
    ("sent late, p99", lambda r: "" if r.summary.lag_p99_s is None else seconds(r.summary.lag_p99_s)),
    ("failures", lambda r: ", ".join(f"{n} × {kind}" for kind, n in r.summary.errors_by_kind.items())),
)
