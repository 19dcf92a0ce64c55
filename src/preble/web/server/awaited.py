"""Requests that a coroutine answers: it awaits the body, and room for more of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from preble.web.messages import CONTINUE, HeaderList
from preble.web.server.answering import Answering, RequestHead

if TYPE_CHECKING:
    from preble.web.server.connection import ClientConnection

_MOST_UNTAKEN_BYTES = 64 * 1024
"""Of a body that the coroutine does not take: with more, nothing is read from the connection."""


class ClientGone(Exception):
    """The client has closed the connection; no answer is possible."""


class AwaitedRequest(Answering):
    """One request, and the task that answers it. What it writes after the client has gone goes nowhere.

    An answer that the task does not complete ends with the connection.
    """

    def __init__(
        self, connection: ClientConnection, head: RequestHead, handle: Callable[[Any], Coroutine[Any, Any, None]]
    ) -> None:
        """`handle`: answers; called with this request."""
        super().__init__(connection, head)
        self._handle = handle
        self._pieces: list[bytes] = []
        self._num_untaken = 0
        self._changed = asyncio.Event()
        """Set when more of the body has come, the client has read on, or has gone."""
        self._is_gone = False
        self._awaits_continue = head.expects_continue
        self._worker: asyncio.Task[Any] | None = None
        """What is cancelled when the client goes."""

    # for the coroutine

    async def piece(self) -> bytes:
        """Return more of the body, b"" at its end. Raises: ClientGone."""
        if self._awaits_continue and self.more_body and not self.response_started:
            self._awaits_continue = False
            self._connection.transport.write(CONTINUE)
        while not self._is_gone:
            if self._pieces:
                body = b"".join(self._pieces)
                self._pieces.clear()
                self._num_untaken = 0
                return body
            if not self.more_body:
                return b""
            self._connection.resume_reading()
            self._changed.clear()
            await self._changed.wait()
        raise ClientGone

    async def drained(self) -> None:
        """Wait while the client reads slowly, and is there."""
        while self._connection.is_write_paused and not (self._is_gone or self.response_complete):
            self._changed.clear()
            await self._changed.wait()

    @contextmanager
    def unless_gone(self) -> Iterator[None]:
        """Cancel the current task, within the context, when the client goes. Raises: ClientGone: it did."""
        if self._is_gone:
            raise ClientGone
        self._worker = worker = asyncio.current_task()
        try:
            yield
        except BaseException as error:
            if not self._is_gone or worker is None:
                raise
            worker.uncancel()
            raise ClientGone from error
        finally:
            self._worker = None

    def reply(self, status: int, headers: HeaderList, body: bytes) -> None:
        if not self._is_gone:
            super().reply(status, headers, body)

    def begin(self, status: int, headers: HeaderList) -> None:
        if not self._is_gone:
            super().begin(status, headers)
            if self._is_head:
                self._connection.transport.write(self._unsent)
                self._unsent, self._is_chunked = b"", False

    def write(self, data: bytes) -> None:
        if not (self._is_gone or self._is_head):
            super().write(data)

    def end(self) -> None:
        if not self._is_gone:
            super().end()

    @property
    def _is_head(self) -> bool:
        return self.head.method == "HEAD"

    # for the connection

    def start(self) -> None:
        self._has_started = True
        task = self._connection.loop.create_task(self._run())
        self._connection.shared.tasks.add(task)
        task.add_done_callback(self._connection.shared.tasks.discard)

    async def _run(self) -> None:
        try:
            await self._handle(self)
        except ClientGone:
            pass
        except Exception as error:  # noqa: BLE001 (the task's root)
            self._connection.fail(error)
        except asyncio.CancelledError:  # the server has ended
            self._connection.transport.abort()
            raise
        else:
            if not (self.response_complete or self._is_owed or self._is_gone):
                self._connection.transport.abort()
        finally:
            self._pieces.clear()  # nobody takes them any more, and the connection may be idle for long

    def received(self, data: bytes) -> None:
        if self.response_complete:
            return
        self._awaits_continue = False
        self._pieces.append(data)
        self._num_untaken += len(data)
        if self._num_untaken > _MOST_UNTAKEN_BYTES:
            self._connection.pause_reading()
        self._changed.set()

    def body_ended(self) -> None:
        self.more_body = False
        if self._has_started:
            self._connection.resume_reading()  # else nobody learns that the client leaves
        self._changed.set()

    def lost(self) -> None:
        self._is_gone = True
        self._changed.set()
        if self._worker is not None and not self.response_complete:
            self._worker.cancel()

    def on_resumed(self) -> None:
        self._changed.set()

    def on_taken(self) -> None:
        self._pieces.clear()
        self._changed.set()

    def on_time(self, now: float) -> None:
        if self.more_body and self._connection.is_client_half_closed():
            self._connection.resume_reading()  # until we learn that the client has left, or has sent the rest
