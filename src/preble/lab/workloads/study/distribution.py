"""Distributions of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class Distribution(msgspec.Struct, frozen=True):
    """Mean, standard deviation and percentiles of numbers, in their unit.

    `sd`: of the numbers themselves (divided by n, not n − 1). `percentiles`: 101 of them, for 0, 1 … 100 percent,
    linear between the two nearest ranks, as in `preble.lab.metrics.summary.percentile`, from the
    least to the greatest.
    """

    mean: float
    sd: float
    percentiles: tuple[float, ...]


def distribution(values: Sequence[float]) -> Distribution:
    """Return the distribution of at least one number. O(n log n).

    Raises: ValueError: no numbers.

    >>> spread = distribution([1.0, 2.0, 3.0, 6.0])
    >>> spread.mean, round(spread.sd, 3), spread.percentiles[50], spread.percentiles[100]
    (3.0, 1.871, 2.5, 6.0)
    >>> distribution([20.3] * 120).sd  # the mean of equal numbers is rounded, and would differ from them
    0.0
    """
    if not values:
        raise ValueError("a distribution needs at least one number")
    numbers = np.asarray(values, dtype=np.float64)
    percentiles = np.percentile(numbers, np.arange(101)).tolist()
    sd = float(numbers.std()) if np.ptp(numbers) > 0 else 0.0
    return Distribution(float(numbers.mean()), sd, tuple(percentiles))
