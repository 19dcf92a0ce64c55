"""Studies side by side, as tables: one row per workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from preble.lab.report import Table
from preble.lab.report.formats import number, seconds
from preble.lab.workloads.study.metrics import (
    GROWTH,
    KEY_PORTION,
    KEY_REQUESTS,
    OUTPUT,
    PROMPT,
    RATIO,
    SESSION,
    SHARED,
    Metric,
)
from preble.lab.workloads.study.study import Study
from preble.lab.workloads.study.timing import PEAK_S

PERCENTS = (5, 25, 50, 75, 95, 99, 100)

Value = TypeVar("Value")
Column = tuple[str, Callable[[Study], str]]


def labels(studies: Sequence[Study]) -> list[str]:
    """Return the names of the workloads, numbered if several have the same.

    >>> from types import SimpleNamespace as Named
    >>> labels([Named(name="a"), Named(name="b"), Named(name="a")])
    ['a', 'b', 'a (2)']
    """
    seen: Counter[str] = Counter()
    result = []
    for study in studies:
        seen[study.name] += 1
        result.append(study.name if seen[study.name] == 1 else f"{study.name} ({seen[study.name]})")
    return result


def prompts_table(studies: Sequence[Study]) -> Table:
    """Return Table 1 of the paper, with the prompt-to-output ratio."""
    columns = [
        ("requests", lambda study: f"{study.requests:,}"),
        *((metric.name, metric.mean_and_sd) for metric in (PROMPT, OUTPUT, RATIO, SHARED, KEY_PORTION, KEY_REQUESTS)),
    ]
    return _table("Prompts: mean ± standard deviation, lengths in tokens", columns, studies)


def cache_table(studies: Sequence[Study]) -> Table:
    """Return what a prefix cache can save."""
    columns: list[Column] = [
        ("prompt tokens", lambda study: f"{study.sharing.prompt_tokens:,}"),
        ("distinct tokens", lambda study: f"{study.sharing.distinct_tokens:,}"),
        ("best hit rate", lambda study: SHARED.text(study.sharing.hit_rate)),
        ("mostly shared", lambda study: SHARED.text(study.sharing.mostly_shared)),
        ("key portions", lambda study: f"{study.sharing.key_portions.nodes:,}"),
    ]
    return _table("What a cache that never forgets would hold and hit", columns, studies)


def arrivals_table(studies: Sequence[Study]) -> Table | None:
    """Return the arrivals; None if no workload has arrival times."""
    if not any(study.arrivals for study in studies):
        return None
    columns: list[Column] = [
        ("arrivals", lambda study: _of(study.arrivals, lambda a: f"{a.requests:,}")),
        ("duration", lambda study: _of(study.arrivals, lambda a: seconds(a.duration_s))),
        ("requests/s", lambda study: _of(study.arrivals, lambda a: _of(a.requests_per_s, number))),
        (f"peak {PEAK_S:g} s", lambda study: _of(study.arrivals, lambda a: f"{number(a.peak_requests_per_s)}/s")),
        ("mean gap", lambda study: _of(study.arrivals, lambda a: seconds(a.gap_s.mean))),
        ("median gap", lambda study: _of(study.arrivals, lambda a: seconds(a.gap_s.percentiles[50]))),
        ("CV of gaps", lambda study: _of(study.arrivals, lambda a: _of(a.gap_cv, number))),
    ]
    return _table("Arrivals", columns, studies)


def sessions_table(studies: Sequence[Study]) -> Table | None:
    """Return the sessions; None if no workload has any."""
    if not any(study.sessions for study in studies):
        return None
    columns: list[Column] = [
        ("sessions", lambda study: _of(study.sessions, lambda s: f"{s.sessions:,}")),
        (SESSION.name, SESSION.mean_and_sd),
        ("that wait for another", lambda study: _of(study.sessions, lambda s: f"{s.waiting:,}")),
        (GROWTH.name, GROWTH.mean_and_sd),
    ]
    return _table("Sessions: mean ± standard deviation, lengths in tokens", columns, studies)


def percentiles_table(metric: Metric, studies: Sequence[Study]) -> Table | None:
    """Return one distribution of every workload that has it; None if none does."""
    spreads = ((label, metric.of(study)) for label, study in zip(labels(studies), studies, strict=True))
    rows = [(label, *(metric.text(spread.percentiles[p]) for p in PERCENTS)) for label, spread in spreads if spread]
    caption = metric.name + (f", {metric.unit}" if metric.unit == "tokens" else "")
    heads = (*(f"p{percent}" for percent in PERCENTS[:-1]), "max")
    return Table(("", *heads), rows, caption[0].upper() + caption[1:]) if rows else None


def summary_tables(studies: Sequence[Study]) -> list[Table]:
    """Return the tables for a terminal: a column per workload, and percentiles of the lengths."""
    tables = (prompts_table(studies), cache_table(studies), arrivals_table(studies), sessions_table(studies))
    rows = [row for table in tables if table is not None for row in _columns_of(table)]
    side_by_side = Table(("", *labels(studies)), rows, "Mean ± standard deviation, lengths in tokens")
    percentiles = (percentiles_table(PROMPT, studies), percentiles_table(OUTPUT, studies))
    return [side_by_side, *(table for table in percentiles if table is not None)]


def _columns_of(table: Table) -> Iterator[Sequence[str]]:
    """Return the columns after the first, each behind its heading."""
    return islice(zip(table.columns, *table.rows, strict=True), 1, None)


def _table(caption: str, columns: Sequence[Column], studies: Sequence[Study]) -> Table:
    heads = ("", *(head for head, _ in columns))
    rows = [
        (label, *(show(study) for _, show in columns)) for label, study in zip(labels(studies), studies, strict=True)
    ]
    return Table(heads, rows, caption)


def _of(value: Value | None, show: Callable[[Value], str]) -> str:
    return "-" if value is None else show(value)
