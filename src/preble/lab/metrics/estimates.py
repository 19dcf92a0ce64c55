"""Means over several seeds, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec

_T_975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
"""Student's t, 0.975 quantile, for 1 to 30 degrees of freedom."""


class Estimate(msgspec.Struct, frozen=True):
    """A mean over `num` independent runs. `half_width`: half of its 95 % interval; None for a single run."""

    mean: float
    half_width: float | None
    num: int

    @property
    def is_vague(self) -> bool:
        """Whether the interval reaches zero: the runs are too few, or too different, to say how much it is.

        >>> Estimate(33.0, 120.0, 2).is_vague, Estimate(33.0, 5.0, 3).is_vague, Estimate(33.0, None, 1).is_vague
        (True, False, False)
        """
        return self.half_width is not None and self.half_width >= abs(self.mean)

    @property
    def low(self) -> float:
        return self.mean - (self.half_width or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half_width or 0.0)


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean and 95 % interval by Student's t: mean ± t(0.975, n − 1) · s / √n, s with n − 1 in its denominator.

    Raises: ValueError: no values.

    >>> of_three = estimate([1.0, 2.0, 3.0])
    >>> of_three.mean, round(of_three.half_width, 3)
    (2.0, 2.484)
    """
    if not values:
        raise ValueError("an estimate needs at least one value")
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return Estimate(mean, student_t_975(n - 1) * deviation / math.sqrt(n), n)


def student_t_975(degrees: int) -> float:
    """Return the 0.975 quantile of Student's t with that many degrees of freedom (at least 1), to four digits.

    Above 30 by the Cornish-Fisher expansion (Abramowitz and Stegun, 26.7.5).

    >>> student_t_975(4), round(student_t_975(60), 3)
    (2.7764, 2.0)
    """
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
