"""The bodies of requests as they arrive: each within its limit, and all of them within the memory budget."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from preble.errors import BodyEncoded, BodyTooLarge, Overloaded
from preble.web.server.answering import RequestHead
from preble.web.server.memory import return_freed_memory

_TIMES_ITS_OWN = 20
"""Between two garbage collections, how many times as long as the last one took: clients cannot make it the work."""


class BodyMemoryBudget:
    """The budget for the bodies that are arriving or being served. `most`: in bytes.

    `may_collect`: whether requests have given back so much that `collect` may have something to do.
    """

    def __init__(self, most: int, *, retry_after_s: float) -> None:
        self.most = most
        self._retry_after_s = retry_after_s
        self.held = 0
        """Bytes taken now."""
        self.may_collect = False
        self._given_back = self._failed = 0
        """Bytes that all requests, and those that failed, have given back since the last collection."""
        self._collect_at = 0.0

    def configure(self, most: int, *, retry_after_s: float) -> None:
        """Keep to this budget from now on."""
        self.most = most
        self._retry_after_s = retry_after_s

    @contextmanager
    def share(self) -> Iterator[BodyShare]:
        """Yield one request's reservation, released at its end."""
        share = BodyShare(self)
        failed = True
        try:
            yield share
            failed = False
        finally:
            share.release(failed=failed)

    def ended(self, size: int, *, failed: bool) -> None:
        """A request that held `size` bytes has ended."""
        self._given_back += size
        self._failed += size * failed
        self.may_collect = self._given_back > self.most // 8

    def collect(self) -> None:
        """Give memory back to the system if requests have given back much: an eighth of the budget.

        Exceptions and cancelled tasks keep the frames of their request, and so its bodies, in cycles. With the rare
        full collections of a gateway such garbage would stay for long, so the garbage collector runs if failed requests
        have held as much. Takes a twentieth of the time at most.
        """
        if (started := time.perf_counter()) < self._collect_at:
            return
        if self._failed > self.most // 8:
            self._failed = 0
            gc.collect()
        self._given_back, self.may_collect = 0, False
        return_freed_memory()
        ended = time.perf_counter()
        self._collect_at = ended + _TIMES_ITS_OWN * (ended - started)

    def full(self) -> Overloaded:
        """Return the error of a request for which there is no room."""
        return Overloaded(
            f"requests of {self.held} bytes are being served, and {self.most} is the limit; try again soon",
            retry_after_s=self._retry_after_s,
        )


class BodyShare:
    """The bytes that one request has taken: none at first. Whoever makes it must release it."""

    __slots__ = ("_room", "held", "most")

    def __init__(self, room: BodyMemoryBudget) -> None:
        self._room = room
        self.held = 0
        self.most = 0
        """The most that it has held at once."""

    def shrink(self, size: int) -> None:
        """Give `size` bytes back."""
        self._room.held -= size
        self.held -= size

    def release(self, *, failed: bool) -> None:
        """Give everything back. `failed`: whether the request failed."""
        self._room.held -= self.held
        self.held = 0
        self._room.ended(self.most, failed=failed)

    def grow(self, size: int) -> None:
        """Take `size` more bytes. Raises: Overloaded: there is no room now."""
        if self._room.held + size > self._room.most:
            raise self._room.full()
        self._room.held += size
        self.held += size
        if self.held > self.most:
            self.most = self.held


_DRAINED_TIMES = 4
"""Of a body that is too large, up to this many times the limit is read and dropped: a client that is still sending may
take a closed connection for a network failure and never see the answer."""


def check_encoding(head: RequestHead) -> None:
    """Raises: BodyEncoded: the headers say that the body is compressed."""
    encoding = head.headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in {b"identity", b""}:
        name = encoding[:40].decode("latin-1")
        raise BodyEncoded(f"the body is compressed (`Content-Encoding: {name}`); send it as it is")


class LimitedBody:
    """The body of one request. `limit`: in bytes.

    `memory` grows with it; whoever made the reservation gives it back.
    """

    __slots__ = ("_head", "_limit", "_memory", "_pieces", "_size")

    def __init__(self, head: RequestHead, limit: int, memory: BodyShare) -> None:
        self._head = head
        self._limit = limit
        self._memory = memory
        self._pieces: list[bytes] = []
        self._size = 0

    def check_head(self) -> None:
        """Raises: BodyEncoded. BodyTooLarge: the client declares more than is worth reading."""
        check_encoding(self._head)
        if (declared := self._head.declared_bytes) > self._limit * _DRAINED_TIMES:
            raise BodyTooLarge(f"the body has {declared} bytes; the limit is {self._limit}")

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
        size = max(self._size, self._head.declared_bytes)
        return BodyTooLarge(f"the body has {size} bytes or more; the limit is {self._limit}")
