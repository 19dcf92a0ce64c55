"""Looking at a simulation now and then, to end it when there is nothing more to learn from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from preble.lab.metrics import RequestRecord


@dataclass(frozen=True, slots=True)
class Glimpse:
    """A simulation at one moment.

    `now`: seconds since its start. `records`: of the requests that have ended. `num_waiting`: requests without a first
    token. `oldest_s`: when the oldest request that has not ended was sent; all that were sent before it have records.
    """

    now: float
    records: Sequence[RequestRecord]
    num_waiting: int
    oldest_s: float


class Watch(Protocol):
    """Is asked every `every_s` simulated seconds."""

    @property
    def every_s(self) -> float: ...

    def has_seen_enough(self, glimpse: Glimpse) -> bool:
        """Return whether the run may end: nothing more is sent but what follows in sessions that have begun."""
        ...
