"""The memory budget for request bodies, over all clients; `limits.max_body_bytes` bounds only each body."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from preble.errors import Overloaded


class BodyMemoryBudget:
    """The budget for the bodies that are arriving or being served. `most`: in bytes."""

    def __init__(self, most: int, *, retry_after_s: float) -> None:
        self._most = most
        self._retry_after_s = retry_after_s
        self.held = 0
        """Bytes taken now."""

    @contextmanager
    def share(self) -> Iterator[BodyReservation]:
        """A context with one request's reservation, released at its end."""
        share = BodyReservation(self)
        try:
            yield share
        finally:
            self.held -= share.held

    def take(self, size: int) -> None:
        """Raises: Overloaded: there is no room now."""
        if self.held + size > self._most:
            raise Overloaded(
                f"requests of {self.held} bytes are being served, and {self._most} is the limit; try again soon",
                retry_after_s=self._retry_after_s,
            )
        self.held += size


class BodyReservation:
    """The bytes that one request has taken."""

    __slots__ = ("_room", "held")

    def __init__(self, room: BodyMemoryBudget) -> None:
        self._room = room
        self.held = 0

    def grow(self, size: int) -> None:
        """Take `size` more bytes. Raises: Overloaded: there is no room now."""
        self._room.take(size)
        self.held += size
