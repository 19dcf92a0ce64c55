"""How much later a decoding batch's tokens come for requests that are admitted meanwhile. Pure.

Bursts of requests and pauses take turns. What an iteration takes without requests is known from the pauses beside each
burst, so that neither a slow drift nor the fit of decoding is in the result.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

LEAST_EVENTS = 8
"""In the two pauses beside a burst together; fewer say too little of an iteration."""


@dataclass(frozen=True, slots=True)
class Burst:
    """`num_requests`, one after the other: the first sent at `start_s`, the last answered at `end_s`."""

    start_s: float
    end_s: float
    num_requests: int

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def extra_s(arrivals_s: Sequence[float], bursts: Sequence[Burst]) -> list[float]:
    """Seconds that a request held the batch up, beyond the iterations in which it was there, on average in each burst.

    `arrivals_s`: of one sequence's tokens while the batch decoded, one an iteration, sorted; `bursts` in order. Those
    that began or ended at another time are left out. Between tokens: what is counted is whole iterations.
    """
    if not arrivals_s:
        return []
    inside = [burst for burst in bursts if arrivals_s[0] < burst.start_s and burst.end_s < arrivals_s[-1]]
    ends = [0]
    for burst in inside:
        ends += [bisect_right(arrivals_s, burst.start_s) - 1, bisect_left(arrivals_s, burst.end_s)]
    ends.append(len(arrivals_s) - 1)
    stretches = [(end - start, arrivals_s[end] - arrivals_s[start]) for start, end in pairwise(ends)]
    found = []
    for number, burst in enumerate(inside):
        (before, before_s), (during, during_s), (after, after_s) = stretches[2 * number : 2 * number + 3]
        if before + after >= LEAST_EVENTS:
            iteration_s = (before_s + after_s) / (before + after)
            found.append((during_s - during * iteration_s) / burst.num_requests)
    return found
