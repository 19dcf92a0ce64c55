"""Does a run settle? Its numbers over time, where its warm-up ends, and what still drifts after that.

A run that ends before its queues are long proves nothing about a service that never ends. Here the stretch in which
requests arrive is cut into equal slices, and two series are judged: the requests in the system, and the hit rate.

1. The warm-up ends where the mean of what is left is known best (MSER: the least variance of the rest, divided by how
   many slices are left), at the latest in the middle.
2. What is left is put into `BATCHES` batches. A series drifts if a straight line through the batches is not flat (99 %,
   Student's t) and its change matters, or if the last batch is more than twice all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import inf, sqrt

import msgspec
import numpy as np
from numpy.typing import NDArray

from preble.lab.metrics.records import RequestRecord
from preble.lab.metrics.summary import Summary, summarize

BATCHES = 8
SLICES = 48
"""At most; each has `REQUESTS_PER_SLICE` requests or more on average."""
REQUESTS_PER_SLICE = 10
_T_995 = 3.7074
"""Student's t, 0.995 quantile, for `BATCHES` - 2 degrees of freedom."""
QUEUE_MATTERS = 0.2
"""A change of the requests in the system that matters, as a share of their mean."""
HIT_RATE_MATTERS = 0.02

Floats = NDArray[np.float64]


class Verdict(StrEnum):
    """What a run says about a service that never ends."""

    STEADY = "steady"
    WARMING = "warming up"
    """It still improves; a longer run would be at least as good."""
    GROWING = "not steady"
    """Queues grow, or the hit rate falls: the cluster does not sustain the rate."""
    SHORT = "too short"
    """It is shorter than the policy's window, or has too few requests: a burst from cold."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers over time, one a slice of `slice_s` seconds from the first arrival to the last.

    `in_system`: requests sent and not ended, on average over the slice. `hit_rate`, `ttft_mean_s`, `e2e_mean_s`: of the
    requests sent in the slice; None where it has none that succeeded.
    """

    slice_s: float
    in_system: list[float]
    hit_rate: list[float | None]
    ttft_mean_s: list[float | None]
    e2e_mean_s: list[float | None]


class Drift(msgspec.Struct, frozen=True):
    """How a series changes over the batches. `change`: of the line through them, over the whole of it, in the series'
    unit. `is_sure`: the line is not flat by chance, or the series rose suddenly at its end."""

    change: float
    is_sure: bool


class Steadiness(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one run, and what it rests on.

    `lasted_s`: first arrival to last. `warm_up_s`: what is left out of `summary`, which is of the requests sent after
    it. `queue_change`: of the requests in the system after the warm-up, as a share of their mean; `hit_rate_change`:
    in shares of the prompt tokens, None where no hit rate is known.
    """

    verdict: Verdict
    lasted_s: float
    warm_up_s: float
    queue_change: float
    hit_rate_change: float | None
    series: Series
    summary: Summary

    @property
    def is_carried(self) -> bool:
        """Whether nothing says that it gets worse."""
        return self.verdict is not Verdict.GROWING

    def __str__(self) -> str:
        if self.verdict in (Verdict.STEADY, Verdict.SHORT):
            return str(self.verdict)
        if not self.queue_change:
            return f"{self.verdict} (overloaded)"
        hits = "" if self.hit_rate_change is None else f", hit rate {self.hit_rate_change:+.1%}"
        return f"{self.verdict} (in the system {self.queue_change:+.0%}{hits})"


def steadiness(
    records: Sequence[RequestRecord], *, until_s: float, least_s: float = 0.0, from_s: float | None = None
) -> Steadiness:
    """Return the verdict on a run from its records. O(n log n).

    `until_s`: when the last request that came by itself was sent; what is sent later is not judged. `least_s`: a run
    whose arrivals take less time is too short. `from_s`: where the warm-up ends, at the latest in the middle; None to
    look for its end.

    Raises: ValueError: no records.
    """
    if not records:
        raise ValueError("a verdict needs at least one record")
    first_s = min(record.scheduled_s for record in records)
    lasted_s = until_s - first_s
    series = _series(records, first_s, until_s)
    num_slices = len(series.in_system)
    if num_slices < 2 * BATCHES or lasted_s < least_s:
        whole = summarize(records)
        return _verdict(Verdict.SHORT, lasted_s, 0.0, Drift(0.0, is_sure=False), None, series, whole)
    hits = filled(series.hit_rate)
    if from_s is None:
        cut = max(warm_up(series.in_system), 0 if hits is None else warm_up(hits))
    else:
        cut = max(0, min(int((from_s - first_s) / series.slice_s), num_slices // 2))
    queue = drift(series.in_system[cut:])
    mean = max(float(np.mean(series.in_system[cut:])), 1e-9)
    hit = None if hits is None else drift(hits[cut:])
    warm_up_s = cut * series.slice_s
    judged = summarize([r for r in records if first_s + warm_up_s <= r.scheduled_s <= until_s])
    relative = Drift(queue.change / mean, queue.is_sure)
    return _verdict(_judge(relative, hit), lasted_s, warm_up_s, relative, hit, series, judged)


def warm_up(values: Sequence[float]) -> int:
    """Return how many leading values to leave out, by MSER: at most half of them.

    >>> warm_up([9.0, 7.0, 1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 1.0])
    2
    """
    array = np.asarray(values, dtype=float)
    best, best_error = 0, inf
    for cut in range(len(array) // 2 + 1):
        rest = array[cut:]
        error = float(rest.var()) / len(rest)
        if error < best_error:
            best, best_error = cut, error
    return best


def drift(values: Sequence[float]) -> Drift:
    """Return how the values change, by `BATCHES` batches of them. Raises: ValueError: fewer values than batches."""
    if len(values) < BATCHES:
        raise ValueError(f"a drift needs at least {BATCHES} values, got {len(values)}")
    means = np.array([float(np.mean(part)) for part in np.array_split(np.asarray(values, dtype=float), BATCHES)])
    places = np.arange(BATCHES) - (BATCHES - 1) / 2
    slope = float(places @ means) / float(places @ places)
    rest = means - means.mean() - slope * places
    error = sqrt(float(rest @ rest) / (BATCHES - 2) / float(places @ places))
    rose = bool(means[-1] > 2 * means[:-1].max() > 0)
    return Drift(slope * (BATCHES - 1), rose or abs(slope) > _T_995 * error)


def filled(values: Sequence[float | None]) -> list[float] | None:
    """Fill every gap with the value before it, leading ones the first value; None where there is none at all."""
    last = next((value for value in values if value is not None), None)
    if last is None:
        return None
    whole: list[float] = []
    for value in values:
        last = last if value is None else value
        whole.append(last)
    return whole


def _judge(queue: Drift, hit: Drift | None) -> Verdict:
    grows = queue.is_sure and queue.change > QUEUE_MATTERS
    shrinks = queue.is_sure and queue.change < -QUEUE_MATTERS
    falls = hit is not None and hit.is_sure and hit.change < -HIT_RATE_MATTERS
    rises = hit is not None and hit.is_sure and hit.change > HIT_RATE_MATTERS
    if grows or (falls and not shrinks):
        return Verdict.GROWING
    return Verdict.WARMING if shrinks or rises else Verdict.STEADY


def _verdict(
    verdict: Verdict, lasted_s: float, warm_up_s: float, queue: Drift, hit: Drift | None, series: Series, of: Summary
) -> Steadiness:
    return Steadiness(
        verdict=verdict,
        lasted_s=lasted_s,
        warm_up_s=warm_up_s,
        queue_change=queue.change,
        hit_rate_change=None if hit is None else hit.change,
        series=series,
        summary=of,
    )


def _series(records: Sequence[RequestRecord], from_s: float, until_s: float) -> Series:
    num = max(1, min(SLICES, len(records) // REQUESTS_PER_SLICE))
    slice_s = max((until_s - from_s) / num, 1e-9)
    bounds: Floats = from_s + slice_s * np.arange(num + 1, dtype=np.float64)
    good = [record for record in records if record.ok and record.first_token_s is not None]
    place = ((np.array([record.scheduled_s for record in good]) - from_s) / slice_s).astype(int)
    place = np.where(place == num, num - 1, place)  # what is sent last of all is in the last slice
    cached = [record.cached_tokens for record in good]
    hits = None if None in cached else np.array(cached, dtype=float)
    prompts = np.array([record.prompt_tokens for record in good], dtype=float)
    ones = np.ones(len(good))
    return Series(
        slice_s=slice_s,
        in_system=[round(float(value), 4) for value in _in_system(records, bounds)],
        hit_rate=[None] * num if hits is None else _ratios(place, hits, prompts, num),
        ttft_mean_s=_ratios(place, np.array([record.ttft_s for record in good], dtype=float), ones, num),
        e2e_mean_s=_ratios(place, np.array([record.e2e_s for record in good], dtype=float), ones, num),
    )


def _in_system(records: Sequence[RequestRecord], bounds: Floats) -> Floats:
    """Return the mean number of requests that were sent and had not ended, between each two bounds."""
    spent = _seconds_before(np.array([r.scheduled_s for r in records]), bounds)
    spent -= _seconds_before(np.array([r.end_s for r in records]), bounds)
    means: Floats = np.diff(spent) / np.diff(bounds)
    return means


def _seconds_before(times: Floats, bounds: Floats) -> Floats:
    """Return, for each bound b, the sum of b - t over the times t before it."""
    ordered = np.sort(times)
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    num_before = np.searchsorted(ordered, bounds)
    seconds: Floats = num_before * bounds - sums[num_before]
    return seconds


def _ratios(place: NDArray[np.int_], above: Floats, below: Floats, num: int) -> list[float | None]:
    """Return, for the requests in each slice, the sum of `above` / that of `below`."""
    inside = place < num
    sums = [np.bincount(place[inside], weights=values[inside], minlength=num) for values in (above, below)]
    return [round(float(a / b), 6) if b else None for a, b in zip(*sums, strict=True)]
