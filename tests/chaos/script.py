"""What goes wrong, and in which order: a function of a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WAYS = ("500", "error", "garbage", "busy", "slow", "silent", "cut", "usage", "events", "unwell")
"""What `chaos.replica` does when it is told to."""
TO_REPLICAS = ("kill", "stop", "upgrade", *WAYS)
TO_GATEWAY = ("full disk", "reload", "flood", "hostile", "restart", "guest")
KINDS = (*TO_REPLICAS, *TO_GATEWAY)


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that goes wrong. `replica`: by its place, for those that happen to a replica."""

    kind: str
    replica: int


def steps(seed: int, num_replicas: int, kinds: Sequence[str] = KINDS) -> Iterator[Step]:
    """Rounds without end; each has every kind once, in an order of its own.

    >>> first = [step.kind for _, step in zip(range(len(KINDS)), steps(1, 4))]
    >>> sorted(first) == sorted(KINDS), list(zip(range(3), steps(1, 4))) == list(zip(range(3), steps(1, 4)))
    (True, True)
    """
    rng = random.Random(seed)
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            yield Step(kind, rng.randrange(num_replicas))
