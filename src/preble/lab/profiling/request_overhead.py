"""A request's overhead: how much it delays a batch that decodes while it is admitted. Pure.

Bursts of requests alternate with pauses. The pauses beside a burst show how long an iteration takes without requests,
so the result contains neither a slow drift of the machine nor an error in the fit of decoding.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

LEAST_EVENTS = 8
"""The fewest iterations in the two pauses beside a burst; fewer measure an iteration too badly."""


@dataclass(frozen=True, slots=True)
class Burst:
    """`num_requests` in sequence: the first sent at `start_s`, the last answered at `end_s`."""

    start_s: float
    end_s: float
    num_requests: int

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def extra_s(arrivals_s: Sequence[float], bursts: Sequence[Burst]) -> list[float]:
    """Return, for each burst, the mean seconds by which a request delayed the batch beyond its own iterations.

    `arrivals_s`: when one sequence's tokens arrived while the batch decoded, one per iteration, sorted. `bursts`: in
    order; those that began before the first token or ended after the last are left out. Only whole iterations count.
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
