"""For how much of the time the answers on each replica stand still of late, because it computes prompts.

It is noted where replicas split alone. Each placement adds the seconds by which its prompt holds up the answers there,
and what was added fades within `MEMORY_S`.
"""

from __future__ import annotations

from math import exp
from typing import Final

from preble.core.replica_index import ReplicaIndex

MEMORY_S: Final = 20.0
"""A few answers' time: shorter, and chance says which replica computes prompts; longer, and roles change late."""


class Standstill:
    """Shares of time, by replica index, and what the mean of all would be if each replica had as many answers."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._noted_at: list[float] = []
        self._even_s = 0.0
        self._even_at = 0.0

    def add_replica(self, replica: ReplicaIndex) -> None:
        """Begin at none. An earlier replica of this index is forgotten."""
        if replica == len(self._seconds):
            self._seconds.append(0.0)
            self._noted_at.append(0.0)
        self._seconds[replica] = 0.0

    def note(self, replica: ReplicaIndex, seconds: float, even_s: float, now: float) -> None:
        """A prompt will be computed on the replica, whose answers stand still for `seconds`. `even_s`: those on a
        replica with as many answers as the mean would stand still for so long.
        """
        self._seconds[replica] = _faded(self._seconds[replica], now - self._noted_at[replica]) + seconds
        self._noted_at[replica] = now
        self._even_s = _faded(self._even_s, now - self._even_at) + even_s
        self._even_at = now

    def share(self, replica: ReplicaIndex, now: float) -> float:
        """Return for which share of the time answers on the replica stand still."""
        return _faded(self._seconds[replica], now - self._noted_at[replica]) / MEMORY_S

    def even_share(self, num_replicas: int, now: float) -> float:
        """Return for which share they would if prompts and answers were spread evenly."""
        return _faded(self._even_s, now - self._even_at) / MEMORY_S / num_replicas


def _faded(seconds: float, passed_s: float) -> float:
    return seconds * exp(-passed_s / MEMORY_S)
