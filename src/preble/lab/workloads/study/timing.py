"""Arrivals of requests."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from preble.lab.workloads.study.distribution import Distribution, distribution

PEAK_S = 10.0
"""Seconds over which a peak rate is measured."""


class ArrivalStudy(msgspec.Struct, frozen=True):
    """Arrivals of the requests that wait for no other.

    `duration_s`: from the first to the last. `requests_per_s`: gaps / duration; None if all arrive at once.
    `gap_s`: seconds from one to the next. `gap_cv`: sd / mean of the gaps: 1 for Poisson, more means bursts; None if
    all arrive at once. `peak_requests_per_s`: most arrivals within any 10 s / 10 s.
    """

    requests: int
    duration_s: float
    requests_per_s: float | None
    gap_s: Distribution
    gap_cv: float | None
    peak_requests_per_s: float


def study_arrivals(times_s: Sequence[float]) -> ArrivalStudy | None:
    """Study arrival times in any order; None for fewer than two. O(n log n).

    >>> arrivals = study_arrivals([0.0, 1.0, 4.0])
    >>> arrivals.requests_per_s, arrivals.gap_s.mean, arrivals.gap_cv, arrivals.peak_requests_per_s
    (0.5, 2.0, 0.5, 0.3)
    """
    if len(times_s) < 2:
        return None
    times = np.sort(np.asarray(times_s, dtype=np.float64))
    gaps = distribution(np.diff(times).tolist())
    within = np.searchsorted(times, times + PEAK_S, side="left") - np.arange(len(times))
    return ArrivalStudy(
        requests=len(times),
        duration_s=float(times[-1] - times[0]),
        requests_per_s=1 / gaps.mean if gaps.mean else None,
        gap_s=gaps,
        gap_cv=gaps.sd / gaps.mean if gaps.mean else None,
        peak_requests_per_s=int(within.max()) / PEAK_S,
    )
