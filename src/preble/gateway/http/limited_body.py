"""A request's body as it arrives: counted against its limit, and kept in memory that the budget has room for."""

from __future__ import annotations

from preble.errors import BodyTooLarge
from preble.gateway.http.body_memory import BodyShare

_DRAINED_TIMES = 4
"""Of a body that is too large, up to this many times the limit is read and dropped: a client that is still sending may
take a closed connection for a network failure and never see the answer."""


class LimitedBody:
    """The body of one request. `limit`: in bytes. `declared`: the length that the client gave, 0 for none.

    `memory` grows with it; whoever made the reservation gives it back.
    """

    __slots__ = ("_declared", "_limit", "_memory", "_pieces", "_size")

    def __init__(self, limit: int, declared: int, memory: BodyShare) -> None:
        self._limit = limit
        self._declared = declared
        self._memory = memory
        self._pieces: list[bytes] = []
        self._size = 0

    def check_declared(self) -> None:
        """Raises: BodyTooLarge: the client declares more than is worth reading."""
        if self._declared > self._limit * _DRAINED_TIMES:
            raise BodyTooLarge(f"the body has {self._declared} bytes; the limit is {self._limit}")

    def add(self, piece: bytes) -> None:
        """Take the next piece. Raises: BodyTooLarge: there is far too much. Overloaded: there is no memory for it."""
        size = len(piece)
        self._size += size
        if self._size <= self._limit:
            self._memory.grow(size)
            self._pieces.append(piece)
        else:
            self._pieces.clear()
            if self._size > self._limit * _DRAINED_TIMES:
                raise self._too_large()

    def whole(self) -> bytes:
        """Return the body, now that all of it is here. Raises: BodyTooLarge."""
        if self._size > self._limit:
            raise self._too_large()
        whole = b"".join(self._pieces)
        self._pieces.clear()
        return whole

    def clear(self) -> None:
        """Drop what has arrived."""
        self._pieces.clear()

    def _too_large(self) -> BodyTooLarge:
        size = max(self._size, self._declared)
        return BodyTooLarge(f"the body has {size} bytes or more; the limit is {self._limit}")
