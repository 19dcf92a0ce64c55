"""How many connections a server has at once: in all, of one address, and some more for probes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from enum import Enum, auto
from math import inf

import structlog

TELL_EVERY_S = 60.0
"""Between two log lines about refused connections."""
_SHARE = 0.5
_LEAST_SHARE = 64
"""Of the connections, what one address may have: half, since a proxy is one address, and 64 however few there are."""
_FOR_PROBES, _FOR_PROBES_OF_ONE = 32, 4
"""Connections beyond the limit on which only probes are answered: in all, and of one address."""


class Access(Enum):
    """What a new connection may do."""

    ALL = auto()
    PROBES = auto()
    NONE = auto()


class ConnectionLimit:
    """Counts connections. Logs refusals, at most one line in a while.

    `most`: connections in all. `probes`: paths that are answered although there is no room, each on a connection that
    is closed then; without any, such connections are refused at once.
    """

    def __init__(self, most: int, probes: Collection[bytes] = ()) -> None:
        self.most = most
        self.probes = probes
        self._share = max(int(_SHARE * most), min(most, _LEAST_SHARE))
        self._of: dict[Access, Counter[str]] = {Access.ALL: Counter(), Access.PROBES: Counter()}
        self._told_at = -inf

    def enter(self, address: str, now: float) -> Access:
        """Count a new connection, and return what it may do. `now`: in seconds, never decreasing."""
        served, probing = self._of[Access.ALL], self._of[Access.PROBES]
        room = Access.NONE
        if served.total() < self.most and served[address] < self._share:
            room = Access.ALL
        elif self.probes and probing.total() < _FOR_PROBES and probing[address] < _FOR_PROBES_OF_ONE:
            room = Access.PROBES
        if room is not Access.NONE:
            self._of[room][address] += 1
        if room is not Access.ALL:
            self._tell(address, now)
        return room

    def leave(self, address: str, room: Access) -> None:
        """A connection that `enter` has counted is over."""
        if room is Access.NONE:
            return
        self._of[room][address] -= 1
        if not self._of[room][address]:
            del self._of[room][address]

    def _tell(self, address: str, now: float) -> None:
        if now - self._told_at < TELL_EVERY_S:
            return
        self._told_at = now
        structlog.get_logger().warning(
            "connections_refused",
            address=address,
            most=self.most,
            most_of_one_address=self._share,
            hint="raise the limit of open files",
        )
