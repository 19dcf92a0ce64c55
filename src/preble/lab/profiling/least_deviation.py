"""Small robust regressions for times: never negative, by relative error, insensitive to a few bad points."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_ROUNDS = 12
_SMALL = 0.005
"""Relative deviations below this are equal, which keeps the weights finite."""


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence nearest to `values` in weighted squares (pool adjacent violators). O(n).

    >>> isotonic([1.0, 3.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0])
    [1.0, 2.5, 2.5, 4.0]
    """
    means: list[float] = []
    totals: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while means and means[-1] > mean:
            mean = (means[-1] * totals[-1] + mean * total) / (totals[-1] + total)
            means.pop()
            total += totals.pop()
            count += counts.pop()
        means.append(mean)
        totals.append(total)
        counts.append(count)
    return [mean for mean, count in zip(means, counts, strict=True) for _ in range(count)]


def non_negative_fit(features: Floats, targets: Floats, scales: Floats) -> tuple[Floats, float]:
    """Return non-negative coefficients with the least sum of |features @ coefficients - targets| / scales, and the sum.

    `features`: one row per target and few columns, since every subset of them is tried. By reweighted least squares;
    deterministic. Columns may differ by many orders of magnitude.
    """
    weights = 1.0 / scales
    coefficients, deviation = np.zeros(features.shape[1]), float("inf")
    for _ in range(_ROUNDS):
        found = _non_negative_squares(features, targets, weights)
        relative = np.abs(features @ found - targets) / scales
        if relative.sum() < deviation:
            coefficients, deviation = found, float(relative.sum())
        weights = 1.0 / (scales * np.sqrt(np.maximum(relative, _SMALL)))
    return coefficients, deviation


def _non_negative_squares(features: Floats, targets: Floats, weights: Floats) -> Floats:
    """Solve weighted least squares without negative coefficients by trying every subset of columns."""
    norms = np.maximum(np.abs(features).max(axis=0), 1e-300)
    scaled, wanted = features / norms * weights[:, None], targets * weights
    columns = range(features.shape[1])
    best, least = np.zeros(len(norms)), float(wanted @ wanted)
    for subset in chain.from_iterable(combinations(columns, size) for size in range(1, len(norms) + 1)):
        used = list(subset)
        found, *_ = np.linalg.lstsq(scaled[:, used], wanted, rcond=None)
        error = scaled[:, used] @ found - wanted
        if (found >= 0).all() and float(error @ error) < least:
            best, least = np.zeros(len(norms)), float(error @ error)
            best[used] = found / norms[used]
    return best
