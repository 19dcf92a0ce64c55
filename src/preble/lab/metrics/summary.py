"""The numbers of a run, from its request records. Failed requests count as errors and nowhere else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import msgspec

from preble.lab.metrics.itl import Itl, itl
from preble.lab.metrics.records import RequestRecord


class Slo(msgspec.Struct, frozen=True):
    """Bounds in seconds that a request must keep to count as goodput; None bounds nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def is_met_by(self, record: RequestRecord) -> bool:
        """Return whether the request succeeded within every bound. A missing time (TPOT of one token) is within.

        >>> record = RequestRecord(request_id="a", scheduled_s=0, sent_s=0, first_token_s=0.5, end_s=2.0)
        >>> Slo(ttft_s=0.5).is_met_by(record), Slo(ttft_s=0.5, e2e_s=1.0).is_met_by(record)
        (True, False)
        """
        pairs = ((record.ttft_s, self.ttft_s), (record.tpot_s, self.tpot_s), (record.e2e_s, self.e2e_s))
        return record.ok and all(value is None or bound is None or value <= bound for value, bound in pairs)


class TimeSummary(msgspec.Struct, frozen=True):
    """Mean and percentiles of some times, in seconds."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one run. Distributions are None where no request has such a time.

    `requests`: all of them; `errors`: those that failed. `duration_s`: first scheduled time to last end.
    `requests_per_s`: successes / duration. `goodput_per_s`: requests within the SLO / duration; None without one.
    `hit_rate`: see `hit_rate`. `recomputed_tokens`: prompt tokens that the engines computed, None where not reported.
    `itl`: of all gaps between tokens, None where they were not measured. `lag_p99_s`: p99 of sent − scheduled, the
    lateness of the load generator.
    """

    requests: int
    errors: int
    duration_s: float
    requests_per_s: float
    ttft: TimeSummary | None
    tpot: TimeSummary | None
    e2e: TimeSummary | None
    itl: Itl | None = None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    recomputed_tokens: int | None
    hit_rate: float | None
    goodput_per_s: float | None
    lag_p99_s: float | None
    requests_per_replica: dict[str, int]
    errors_by_kind: dict[str, int]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` of the values lie: linear between the two nearest ranks. O(n log n).

    With the values sorted as v[0] … v[n−1] and r = (n − 1) · percent / 100: v[⌊r⌋] + (r − ⌊r⌋) · (v[⌈r⌉] − v[⌊r⌋]).

    Raises: ValueError: no values, or a percent outside 0 … 100.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 50)
    2.5
    >>> percentile([7.0], 99)
    7.0
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"percentile needs values and a percent in 0 ... 100, got {len(values)} and {percent}")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low])


def distribution(values: Sequence[float]) -> TimeSummary | None:
    """Return mean and percentiles; None for no values.

    >>> distribution([1.0, 2.0, 3.0]).p50_s
    2.0
    """
    if not values:
        return None
    p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
    return TimeSummary(mean_s=math.fsum(values) / len(values), p50_s=p50, p90_s=p90, p99_s=p99, max_s=max(values))


def hit_rate(records: Iterable[RequestRecord]) -> float | None:
    """Return the share of prompt tokens taken from a cache = Σ cached tokens / Σ prompt tokens, in 0 … 1.

    Over the requests whose engine reported its cache; None if there are none.

    >>> common = {"scheduled_s": 0, "sent_s": 0, "end_s": 1, "prompt_tokens": 100}
    >>> hit_rate([
    ...     RequestRecord(request_id="a", cached_tokens=96, **common),
    ...     RequestRecord(request_id="b", cached_tokens=0, **common),
    ... ])
    0.48
    """
    reported = [(r.cached_tokens, r.prompt_tokens) for r in records if r.ok and r.cached_tokens is not None]
    prompt_tokens = sum(prompt for _, prompt in reported)
    return sum(cached for cached, _ in reported) / prompt_tokens if prompt_tokens else None


def goodput_per_s(records: Sequence[RequestRecord], slo: Slo, duration_s: float) -> float:
    """Return the requests within the SLO per second = |{r : r within slo}| / duration.

    >>> record = RequestRecord(request_id="a", scheduled_s=0, sent_s=0, first_token_s=0.5, end_s=2.0)
    >>> goodput_per_s([record, record], Slo(ttft_s=1.0), duration_s=4.0)
    0.5
    """
    return sum(slo.is_met_by(record) for record in records) / duration_s if duration_s > 0 else 0.0


def summarize(records: Sequence[RequestRecord], slo: Slo | None = None) -> Summary:
    """Return the numbers of a run. O(n log n)."""
    good = [record for record in records if record.ok]
    duration = max((r.end_s for r in records), default=0.0) - min((r.scheduled_s for r in records), default=0.0)
    reports_cache = any(record.cached_tokens is not None for record in good)
    return Summary(
        requests=len(records),
        errors=len(records) - len(good),
        duration_s=duration,
        requests_per_s=len(good) / duration if duration > 0 else 0.0,
        ttft=distribution([r.ttft_s for r in good if r.ttft_s is not None]),
        tpot=distribution([r.tpot_s for r in good if r.tpot_s is not None]),
        e2e=distribution([r.e2e_s for r in good]),
        itl=itl(r.gaps for r in good),
        prompt_tokens=sum(r.prompt_tokens for r in good),
        output_tokens=sum(r.output_tokens for r in good),
        cached_tokens=sum(r.cached_tokens or 0 for r in good) if reports_cache else None,
        recomputed_tokens=sum(r.recomputed_tokens or 0 for r in good) if reports_cache else None,
        hit_rate=hit_rate(good),
        goodput_per_s=None if slo is None else goodput_per_s(records, slo, duration),
        lag_p99_s=percentile([r.lag_s for r in records], 99) if records else None,
        requests_per_replica=_counted(r.replica for r in good),
        errors_by_kind=_counted(r.error for r in records),
    )


def _counted(names: Iterable[str | None]) -> dict[str, int]:
    return dict(sorted(Counter(name for name in names if name is not None).items()))


def load_imbalance(busy_s: Collection[float]) -> float | None:
    """Return the busiest replica's GPU seconds divided by the average replica's; 1 is perfectly even.

    None when no replica computed anything.

    >>> load_imbalance([3.0, 1.0, 2.0, 2.0])
    1.5
    """
    total = math.fsum(busy_s)
    return max(busy_s) * len(busy_s) / total if total else None
