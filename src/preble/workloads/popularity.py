"""Which of n things a request asks for."""

from __future__ import annotations

import random
from bisect import bisect_right
from itertools import accumulate

from preble.errors import ConfigError


class Zipf:
    """Ranks 0 … n−1, rank i with a probability in proportion to 1 / (i + 1)^a. a = 0 is uniform. Immutable."""

    __slots__ = ("_cumulative",)

    def __init__(self, num_items: int, a: float) -> None:
        """Raises: ConfigError: no items, or a negative exponent."""
        if num_items < 1 or a < 0:
            raise ConfigError(f"popularity needs at least one item and a Zipf exponent >= 0, got {num_items} and {a}")
        self._cumulative: list[float] = list(accumulate(float(rank + 1) ** -a for rank in range(num_items)))

    def probability(self, rank: int) -> float:
        """
        >>> Zipf(4, 0.0).probability(3)
        0.25
        """
        below = self._cumulative[rank - 1] if rank else 0.0
        return (self._cumulative[rank] - below) / self._cumulative[-1]

    def pick(self, rng: random.Random) -> int:
        """A rank. O(log n).

        >>> Zipf(1, 1.1).pick(random.Random(0))
        0
        """
        return min(bisect_right(self._cumulative, rng.random() * self._cumulative[-1]), len(self._cumulative) - 1)
