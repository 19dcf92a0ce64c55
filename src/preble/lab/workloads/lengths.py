"""Lengths in tokens, drawn from a distribution."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

Family = Literal["normal", "lognormal", "gamma"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers: its family, mean, standard deviation and bounds.

    A draw outside `low` and `high` moves to the nearer bound, so narrow bounds shift the mean and deviation a little.
    """

    family: Family
    mean: float
    sd: float
    low: int = 1
    high: int = 1_000_000

    def draw(self, rng: random.Random) -> int:
        """
        >>> Lengths("normal", 4, 1.5, low=1, high=1).draw(random.Random(0))
        1
        """
        return min(max(round(self._value(rng)), self.low), self.high)

    def _value(self, rng: random.Random) -> float:
        if self.family == "normal":
            return rng.normalvariate(self.mean, self.sd)
        relative_variance = (self.sd / self.mean) ** 2
        if self.family == "gamma":
            return rng.gammavariate(1 / relative_variance, self.mean * relative_variance)
        sigma2 = math.log1p(relative_variance)
        return rng.lognormvariate(math.log(self.mean) - sigma2 / 2, math.sqrt(sigma2))
