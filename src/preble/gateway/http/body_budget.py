"""How many bytes of requests are held at once, over all clients: `limits.max_body_bytes` bounds only each one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from preble.errors import Overloaded


class BodyMemoryBudget:
    """Room for the bodies that arrive or are being worked on. `most`: in bytes."""

    def __init__(self, most: int, *, retry_after_s: float) -> None:
        self._most = most
        self._retry_after_s = retry_after_s
        self.held = 0
        """Bytes that are taken now."""

    @contextmanager
    def share(self) -> Iterator[BodyReservation]:
        """A request's part of it, given back at the end."""
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
    """What one request has taken."""

    __slots__ = ("_room", "held")

    def __init__(self, room: BodyMemoryBudget) -> None:
        self._room = room
        self.held = 0

    def grow(self, size: int) -> None:
        """Take so many bytes more. Raises: Overloaded: there is no room now."""
        self._room.take(size)
        self.held += size
