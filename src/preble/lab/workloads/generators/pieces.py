"""What the generators share: made-up segments, and how many requests use each."""

from __future__ import annotations

import random
from dataclasses import dataclass

from preble.errors import ConfigError
from preble.lab.workloads.lengths import Lengths
from preble.lab.workloads.model import Segment
from preble.lab.workloads.popularity import Popularity, Zipf
from preble.lab.workloads.trace import made_up_tokens


@dataclass(frozen=True, slots=True)
class Asked:
    """What a generator makes a workload of, without arrival times; the same of it gives the same workload.

    `popularity` of the tools, documents or the like that requests share, and how many there are, `num_prefixes`: None
    for the workload's own.
    """

    num_requests: int
    seed: int
    popularity: Popularity | None = None
    num_prefixes: int | None = None

    @property
    def assistants(self) -> Zipf:
        """What shares its requests among assistants: one by default, and as popular as each other."""
        return Zipf(
            1 if self.num_prefixes is None else self.num_prefixes, self.popularity.a if self.popularity else 0.0
        )


def made_up_segment(name: str, num_tokens: int) -> Segment:
    """Return a segment of this length; the same name is the same content."""
    return Segment(name, tokens=made_up_tokens(name, num_tokens))


def draw_uses(total: int, uses: Lengths, num_pieces: int | None, rng: random.Random) -> list[int]:
    """Return how often each piece is used: `num_pieces` draws, or for None draws that add up to `total`.

    Raises: ConfigError: no request or no piece.

    >>> draw_uses(10, Lengths("normal", 4, 0), None, random.Random(0))
    [4, 4, 2]
    """
    if total < 1 or (num_pieces is not None and num_pieces < 1):
        raise ConfigError(f"a workload needs at least one request and one prefix, got {total} and {num_pieces}")
    if num_pieces is not None:
        return [uses.draw(rng) for _ in range(num_pieces)]
    drawn: list[int] = []
    left = total
    while left:
        drawn.append(min(uses.draw(rng), left))
        left -= drawn[-1]
    return drawn
