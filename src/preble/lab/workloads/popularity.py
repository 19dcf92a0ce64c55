"""Popularity: which of n things a request asks for."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, cast, get_args

from preble.errors import ConfigError

Kind = Literal["uniform", "zipf", "recorded"]
POPULARITIES: tuple[Kind, ...] = get_args(Kind)
DEFAULT_ZIPF = 1.1
"""The exponent of the paper's ablation. ServeGen measured 1.1 to 1.25 on the clients of a large service."""


class Zipf:
    """Ranks 0 … n−1; the probability of rank i is proportional to 1 / (i + 1)^a. a = 0 is uniform. Immutable."""

    __slots__ = ("_cumulative",)

    def __init__(self, num_items: int, a: float) -> None:
        """Raises: ConfigError: no items, or a negative exponent."""
        if num_items < 1 or not 0 <= a < math.inf:
            raise ConfigError(f"popularity needs at least one item and a Zipf exponent >= 0, got {num_items} and {a}")
        self._cumulative: list[float] = list(accumulate(float(rank + 1) ** -a for rank in range(num_items)))

    def pick(self, rng: random.Random) -> int:
        """Draw a rank. O(log n).

        >>> Zipf(1, 1.1).pick(random.Random(0))
        0
        """
        return min(bisect_right(self._cumulative, rng.random() * self._cumulative[-1]), len(self._cumulative) - 1)


@dataclass(frozen=True, slots=True)
class Popularity:
    """How requests are spread over the things that they ask for, such as tools or documents.

    `kind`: uniform; zipf, by Zipf's law with exponent `a`; or recorded, as in the workload itself.
    """

    kind: Kind = "recorded"
    a: float = 0.0

    def __str__(self) -> str:
        return f"zipf {self.a:g}" if self.kind == "zipf" else self.kind

    @classmethod
    def of(cls, kind: str | None, zipf: float | None) -> Popularity | None:
        """Return the popularity for these options; None if both are None. An exponent alone means zipf.

        Raises: ConfigError: an unknown kind, or an exponent for one that has none.

        >>> Popularity.of(None, 1.2)
        Popularity(kind='zipf', a=1.2)
        """
        if kind is None:
            return None if zipf is None else cls("zipf", zipf)
        if kind not in POPULARITIES:
            raise ConfigError(f"unknown popularity {kind!r}; choose one of {', '.join(POPULARITIES)}")
        if kind == "zipf":
            return cls("zipf", DEFAULT_ZIPF if zipf is None else zipf)
        if zipf is not None:
            raise ConfigError(f"popularity {kind} has no exponent; leave out zipf ({zipf}), or choose popularity zipf")
        return cls(cast(Kind, kind))

    def picks(self, num_picks: int, recorded: Sequence[int], rng: random.Random) -> list[int]:
        """Return an index into `recorded` for each pick. `recorded`: how often the workload itself asks for each.

        Recorded popularity gives each index exactly its share of the picks, in random order, like a shuffled workload.
        The others draw each pick independently; with zipf, index 0 is the most popular.

        >>> sorted(Popularity("recorded").picks(6, [4, 2, 6], random.Random(0)))
        [0, 0, 1, 2, 2, 2]
        """
        if self.kind != "recorded":
            zipf = Zipf(len(recorded), self.a)
            return [zipf.pick(rng) for _ in range(num_picks)]
        picks = [index for index, count in enumerate(in_proportion(num_picks, recorded)) for _ in range(count)]
        rng.shuffle(picks)
        return picks


def in_proportion(total: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers that add up to `total`, each within one of its share; largest remainders round up.

    Raises: ConfigError: no weight, a negative one, or only zeros.

    >>> in_proportion(10, [1, 1, 2])
    [3, 2, 5]
    """
    if not weights or min(weights) < 0 or not sum(weights):
        raise ConfigError(f"shares must be positive numbers, got {list(weights)}")
    shares = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda i: counts[i] - shares[i])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts
