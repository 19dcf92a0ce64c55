"""How some numbers are spread."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class Distribution(msgspec.Struct, frozen=True):
    """Mean, standard deviation and percentiles of some numbers, in the unit of the numbers.

    `sd`: of the numbers themselves (divided by n, not n − 1). `percentiles`: 101 of them, for 0, 1 … 100 percent,
    linear between the two nearest ranks, as `preble.metrics.summary.percentile` has them; the least comes first, the
    greatest last.
    """

    mean: float
    sd: float
    percentiles: tuple[float, ...]


def distribution(values: Sequence[float]) -> Distribution:
    """Of at least one number. O(n log n).

    Raises: ValueError: no numbers.

    >>> spread = distribution([1.0, 2.0, 3.0, 6.0])
    >>> spread.mean, round(spread.sd, 3), spread.percentiles[50], spread.percentiles[100]
    (3.0, 1.871, 2.5, 6.0)
    """
    if not values:
        raise ValueError("no numbers have no mean; ask for the distribution of at least one")
    numbers = np.asarray(values, dtype=np.float64)
    percentiles = np.percentile(numbers, np.arange(101)).tolist()
    return Distribution(float(numbers.mean()), float(numbers.std()), tuple(percentiles))
