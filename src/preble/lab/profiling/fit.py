"""Fit a `CostProfile` to measured times: monotone, never negative, few points. Pure.

Prefill without a cached prefix: an isotonic regression of the medians, reduced to the points that matter. What a cached
prefix adds, and decoding: linear, with coefficients that are not negative, by least absolute relative deviation, so
that one disturbed measurement does not bend them. A request's overhead: the median time, beyond these, by which
requests delay a batch that decodes. Loading from a tier: the median time by which it delays a first token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median

import numpy as np

from preble.core.costs.model import CostModel, CostProfile
from preble.core.types import Tier
from preble.errors import ConfigError
from preble.lab.profiling.least_deviation import isotonic, non_negative_fit
from preble.lab.profiling.measurements import (
    NOISY_SPREAD,
    AdmissionTimes,
    DecodeTimes,
    Measurements,
    PrefillTimes,
    spread,
)

KNOT_TOLERANCE = 0.02
"""A point is dropped if without it the relative error stays within this at every measured length."""

TYPICAL_BATCH = 16
BAD_ERROR = 0.25
_GRID = 24
_ALIKE = 0.002
"""Fits whose mean relative deviations differ by at most this are equally good."""

Points = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class FittedTime:
    """One measurement and its fitted time. `measured_s`: the median, without the way to the replica and back.

    `num_sequences` is 0 for a prefill; `new_tokens` is 0 for a decode. `context_tokens`: cached ones for a prefill,
    those of all sequences for a decode.
    """

    new_tokens: int
    num_sequences: int
    context_tokens: int
    measured_s: float
    fitted_s: float
    spread: float

    @property
    def relative_error(self) -> float:
        """(fitted - measured) / measured."""
        return (self.fitted_s - self.measured_s) / self.measured_s


@dataclass(frozen=True, slots=True)
class Fit:
    """`overhead_s`: a request's way to the replica and back, subtracted from every measured prefill."""

    profile: CostProfile
    overhead_s: float
    times: tuple[FittedTime, ...]

    @property
    def median_error(self) -> float:
        """Return the median size of the relative errors."""
        return median(abs(time.relative_error) for time in self.times)

    def warnings(self) -> list[str]:
        """Return sentences that cast doubt on the fit; empty if there are none."""
        found = []
        typical = median(time.spread for time in self.times)
        if typical > NOISY_SPREAD:
            found.append(
                f"repetitions differ by {typical:.0%} (median over the points): was the replica, or its machine, busy "
                "with something else? Measure again when it is idle"
            )
        bad = [time for time in self.times if abs(time.relative_error) > BAD_ERROR]
        if bad:
            found.append(f"{len(bad)} of {len(self.times)} points are off the fit by more than {BAD_ERROR:.0%}")
        return found


def fit_profile(measurements: Measurements, *, name: str, source: str, typical_batch: int | None = None) -> Fit:
    """Return the cost profile that fits these measurements.

    `typical_batch`: sequences that will share a decode iteration in service; None takes 16, or the largest measured
    batch if smaller. Raises: ConfigError: fewer than two prompt lengths, or no decoding, were measured.
    """
    alone = [times for times in measurements.prefill if not times.cached_tokens]
    if len({times.new_tokens for times in alone}) < 2 or not measurements.decode:
        raise ConfigError(
            "a profile needs times of at least two prompt lengths and of decoding; measure again without --quick"
        )
    overhead_s = _overhead_s(measurements) if measurements.over_http else 0.0
    points = prefill_points(alone, overhead_s)
    per_pair, per_context = _attention(measurements.prefill, points, overhead_s)
    base, per_sequence, per_context_token = _decode(measurements.decode, points)
    profile = CostProfile(
        name=name,
        source=source,
        prefill_points=tuple((n, _rounded(s)) for n, s in points),
        attention_s_per_pair=_rounded(per_pair),
        attention_s_per_context_token=_rounded(per_context),
        decode_base_s=_rounded(base),
        decode_s_per_sequence=_rounded(per_sequence),
        decode_s_per_context_token=_rounded(per_context_token),
        kv_capacity_tokens=measurements.kv_capacity_tokens,
        typical_batch=typical_batch or min(TYPICAL_BATCH, max(times.num_sequences for times in measurements.decode)),
    )
    profile = replace(profile, request_overhead_s=_rounded(_request_overhead_s(measurements.admissions, profile)))
    profile = _with_loading(profile, measurements)
    return Fit(profile, overhead_s, tuple(_compared(measurements, profile, overhead_s)))


def _with_loading(profile: CostProfile, measurements: Measurements) -> CostProfile:
    """Return it with the median time to load a token from the tier, where that was measured."""
    if not measurements.loads:
        return profile
    rate_s = _rounded(max(median(times.per_token_s for times in measurements.loads), 0.0))
    if measurements.tier is Tier.STORE:
        return replace(profile, store_load_s_per_token=rate_s)
    return replace(profile, host_load_s_per_token=rate_s)


def _overhead_s(measurements: Measurements) -> float:
    """Return by how much the quickest prefill exceeds the fixed part of a decode iteration.

    For the engine both are one iteration over very few tokens; the difference is the prompt's way to the replica.
    """
    quickest_s = min(times.median_s for times in measurements.prefill)
    return max(quickest_s - _empty_iteration_s(measurements.decode), 0.0)


def _empty_iteration_s(decode: tuple[DecodeTimes, ...]) -> float:
    measured = np.array([t.median_s for t in decode])
    if len({t.num_sequences for t in decode}) == 1:
        return float(measured.min())
    features = np.array([[1, t.num_sequences, t.context_tokens] for t in decode], float)
    coefficients, _ = non_negative_fit(features, measured, measured)
    return float(coefficients[0]) or float(measured.min())


def prefill_points(alone: list[PrefillTimes], overhead_s: float = 0.0) -> Points:
    """Return (tokens, seconds), monotone, from 0 tokens, with the fewest points within `KNOT_TOLERANCE` of all."""
    ordered = sorted(alone, key=lambda times: times.new_tokens)
    lengths, seconds = [], []
    for new_tokens, group in groupby(ordered, key=lambda times: times.new_tokens):
        measured = [s for times in group for s in times.seconds]
        lengths.append(new_tokens)
        seconds.append(max(median(measured) - overhead_s, 1e-9))
    fitted = isotonic(seconds, [1.0 / s**2 for s in seconds])
    (n0, s0), (n1, s1) = (lengths[0], fitted[0]), (lengths[1], fitted[1])
    at_zero = max(s0 - n0 * (s1 - s0) / (n1 - n0), 0.0)
    return _without_needless([(0, at_zero), *zip(lengths, fitted, strict=True)])


def _without_needless(points: Points) -> Points:
    """Drop inner points, the least important first, while no point errs by more than the tolerance."""
    kept = list(points)
    while len(kept) > 2:
        candidates = [kept[:i] + kept[i + 1 :] for i in range(1, len(kept) - 1)]
        best = min(candidates, key=lambda fewer: _worst_miss(fewer, points))
        if _worst_miss(best, points) > KNOT_TOLERANCE:
            break
        kept = best
    return kept


def _worst_miss(kept: Points, points: Points) -> float:
    return max(abs(_alone_s(kept, n) - s) / max(s, 1e-12) for n, s in points)


def _alone_s(points: Points, num_tokens: int) -> float:
    return float(np.interp(num_tokens, [n for n, _ in points], [s for _, s in points]))


def _attention(prefill: tuple[PrefillTimes, ...], points: Points, overhead_s: float) -> tuple[float, float]:
    """Return seconds per (new x cached) token pair, and per cached token."""
    behind = [times for times in prefill if times.cached_tokens]
    if not behind:
        return 0.0, 0.0
    features = np.array([[t.new_tokens * t.cached_tokens, t.cached_tokens] for t in behind], float)
    measured = np.array([t.median_s for t in behind])
    extra = measured - overhead_s - np.array([_alone_s(points, t.new_tokens) for t in behind])
    coefficients, _ = non_negative_fit(features, extra, measured)
    return float(coefficients[0]), float(coefficients[1])


def _decode(decode: tuple[DecodeTimes, ...], points: Points) -> tuple[float, float, float]:
    """Return base, per_sequence and per_context_token of max(prefill of the batch, base) + linear.

    The maximum makes the problem non-convex, so the base is searched on a refined grid; the other two follow from it.
    Of equally good bases the largest wins: below the prefill of one token a base has no effect.
    """
    features = np.array([[t.num_sequences, t.context_tokens] for t in decode], float)
    measured = np.array([t.median_s for t in decode])
    floors = np.array([_alone_s(points, t.num_sequences) for t in decode])

    def with_base(base: float) -> tuple[float, float, float, float]:
        linear, deviation = non_negative_fit(features, measured - np.maximum(floors, base), measured)
        return deviation, base, float(linear[0]), float(linear[1])

    low, high = 0.0, float(measured.max())
    for _ in range(4):
        tried = [with_base(float(base)) for base in np.linspace(low, high, _GRID)]
        alike = min(tried)[0] + _ALIKE * len(decode)
        best = max((found for found in tried if found[0] <= alike), key=lambda found: found[1])
        step = (high - low) / (_GRID - 1)
        low, high = max(best[1] - step, 0.0), best[1] + step
    return best[1:]


def _request_overhead_s(admissions: tuple[AdmissionTimes, ...], profile: CostProfile) -> float:
    """Return the median over the bursts of the delay that the model lacks; 0.0 if none was measured."""
    model = CostModel(profile)
    lacking = [seconds - _added_s(model, times) for times in admissions for seconds in times.seconds]
    return max(median(lacking), 0.0) if lacking else 0.0


def _added_s(model: CostModel, times: AdmissionTimes) -> float:
    """Return how much longer an iteration is that also computes the request's tokens, without its overhead."""
    batch = times.num_sequences, times.context_tokens
    return model.iteration_s([(times.new_tokens, 0)], *batch) - model.iteration_s((), *batch)


def _rounded(seconds: float) -> float:
    """Round to four significant digits; no measurement is more precise."""
    return float(f"{seconds:.4g}")


def _compared(measurements: Measurements, profile: CostProfile, overhead_s: float) -> list[FittedTime]:
    model = CostModel(profile)
    compared = [
        FittedTime(
            new_tokens=t.new_tokens,
            num_sequences=0,
            context_tokens=t.cached_tokens,
            measured_s=max(t.median_s - overhead_s, 1e-9),
            fitted_s=model.prefill_s(t.new_tokens, t.cached_tokens),
            spread=spread(t.seconds),
        )
        for t in measurements.prefill
    ]
    compared += [
        FittedTime(
            new_tokens=0,
            num_sequences=t.num_sequences,
            context_tokens=t.context_tokens,
            measured_s=t.median_s,
            fitted_s=model.iteration_s((), t.num_sequences, t.context_tokens),
            spread=spread(t.seconds),
        )
        for t in measurements.decode
    ]
    return compared
