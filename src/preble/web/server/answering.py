"""One request of a client and its answer, by callbacks: a connection knows nothing else of what it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from preble.web.messages import CONTINUE, LAST_CHUNK, HeaderList, answer_head, chunk

if TYPE_CHECKING:
    from preble.web.server.connection import ClientConnection

_CLOSE = (b"connection", b"close")
_CHUNKED = (b"transfer-encoding", b"chunked")
_WITHOUT_BODY = (204, 304)
"""Statuses whose answers have no body, so also no last chunk: a client would take that for the next answer."""


@dataclass(slots=True)
class RequestHead:
    """What a client asks for. `headers`: by name in lower case. `query`: the URL's part after `?`. `keeps_alive`:
    whether the connection stays open. `expects_continue`: the client sends the body once it is told to."""

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    query: bytes = b""
    is_http10: bool = False
    keeps_alive: bool = True
    expects_continue: bool = False

    @property
    def declared_bytes(self) -> int:
        """The length of the body that the client states, 0 if it states none."""
        declared = self.headers.get(b"content-length", b"0")
        return int(declared) if declared.isdigit() else 0


class Answering:
    """One request and its answer; subclass it. The connection calls `start` at this request's turn, and the methods
    below it, `on_time` and `on_stop` whenever what they name happens.

    `response_started`, `response_complete`, `more_body`: how far the answer and the body are. `keep_alive`: whether the
    connection stays open after the answer.
    """

    response_started = False
    response_complete = False
    more_body = True
    is_streaming = False
    """Whether `begin` has begun the answer, and `end` has not ended it."""
    _is_chunked = False
    _unsent = b""
    _has_started = False
    _is_owed = False
    """Whether the answer is written, and will be complete when the client has read most of it."""

    def __init__(self, connection: ClientConnection, head: RequestHead) -> None:
        self.head = head
        self.keep_alive = head.keeps_alive
        self._connection = connection
        self._early: list[bytes] = []
        """The part of the body that came before this request's turn: at most one read from the socket."""

    # for subclasses

    def on_start(self) -> None:
        """It is the turn of this request, and its body may come."""

    def on_body(self, data: bytes) -> None:
        """More of the body."""

    def on_body_end(self) -> None:
        """The body is complete."""

    def on_gone(self) -> None:
        """The client has closed the connection and will not read the answer. Called once, after `on_start`."""

    def on_paused(self) -> None:
        """The client reads slowly: write nothing more, if that is possible."""

    def on_resumed(self) -> None:
        """The client has read what there was."""

    def on_taken(self) -> None:
        """The client has read most of a whole answer that it read slowly."""

    def on_time(self, now: float) -> None:
        """Some time has passed; called a few times a second. `now`: by the event loop's clock."""

    def on_stop(self) -> None:
        """The server stops: answer now."""

    def on_failed(self, error: Exception) -> None:
        """An exception has escaped `on_start`, `on_body` or `on_body_end`, a bug: log it, answer, and give back what
        the request has taken. The connection ends afterwards."""
        raise error

    # for the connection

    def start(self) -> None:
        """Begin to serve the request."""
        self._has_started = True
        try:
            self.on_start()
            if self.more_body and self.head.expects_continue and not self.response_started:
                self._connection.transport.write(CONTINUE)
            early, self._early = self._early, []
            for data in early:
                if not self.response_complete:
                    self.on_body(data)
            if not self.more_body and not self.response_complete:
                self.on_body_end()
        except Exception as error:  # noqa: BLE001 (else the parser would take it for the client's mistake)
            self._failed(error)

    def received(self, data: bytes) -> None:
        """More of the body has come."""
        if not self._has_started:
            self._early.append(data)
        elif not self.response_complete:
            try:
                self.on_body(data)
            except Exception as error:  # noqa: BLE001 (as in `start`)
                self._failed(error)

    def body_ended(self) -> None:
        """The body is complete."""
        self.more_body = False
        if self._has_started and not self.response_complete:
            try:
                self.on_body_end()
            except Exception as error:  # noqa: BLE001 (as in `start`)
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.keep_alive = False
        self.on_failed(error)
        self._connection.transport.close()

    def lost(self) -> None:
        """The connection is gone."""
        if self._has_started and not self.response_complete:
            self.on_gone()

    def resumed(self) -> None:
        """The connection takes more."""
        if self._is_owed:
            self._is_owed = False
            self._connection.on_response_complete(self)
            self.on_taken()
        elif not self.response_complete:
            self.on_resumed()

    # the answer

    def reply(self, status: int, headers: HeaderList, body: bytes) -> None:
        """Write a whole answer. If the client reads slowly, it is complete only when most of it has been read."""
        head = self._head(status, [*headers, (b"content-length", b"%d" % len(body))])
        # Not `writelines`: that of asyncio in 3.12.0 to 3.12.8 and 3.13.0 to 3.13.1 never pauses (CVE-2024-12254).
        # uvloop sends both in one call.
        self._connection.transport.write(head)
        if self.head.method != "HEAD":
            self._connection.transport.write(body)
        self._is_owed = self._connection.is_write_paused
        if not self._is_owed:
            self._connection.on_response_complete(self)

    def begin(self, status: int, headers: HeaderList) -> None:
        """Begin an answer whose length is unknown. Its head goes out with the first `write`, to save a system call."""
        self.is_streaming = True
        self._is_chunked = not self.head.is_http10 and status not in _WITHOUT_BODY
        if not self._is_chunked:
            self.keep_alive = False
        self._unsent = self._head(status, [*headers, _CHUNKED] if self._is_chunked else headers)

    def write(self, data: bytes) -> None:
        """Write more of an answer that `begin` has begun. `data`: not empty."""
        if self._is_chunked:
            data = chunk(data)
        if self._unsent:
            data, self._unsent = self._unsent + data, b""
        self._connection.transport.write(data)

    def end(self) -> None:
        """End an answer that `begin` has begun."""
        self.is_streaming = False
        end = self._unsent + LAST_CHUNK if self._is_chunked else self._unsent
        if end:
            self._connection.transport.write(end)
        self._connection.on_response_complete(self)

    def _head(self, status: int, headers: HeaderList) -> bytes:
        self.response_started = True
        if _CLOSE in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            headers = [*headers, _CLOSE]
        return answer_head(status, [*self._connection.shared.default_headers, *headers])


Accept = Callable[["ClientConnection", RequestHead], Answering]
"""Returns what answers a request whose head has come."""


def run_until_wait(coroutine: Coroutine[Any, None, None], loop: asyncio.AbstractEventLoop) -> asyncio.Task[None] | None:
    """Run a coroutine that hardly ever waits until it does or ends. Return the task of its rest, None if it has ended.

    Before it waits there is no current task. So it must wait for a turn of the event loop (`asyncio.sleep(0)`) before
    it uses what needs one, such as `asyncio.timeout` or a `TaskGroup`. Raises: what the coroutine raises at once.
    """
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        return None
    return loop.create_task(_Rest(coroutine, waits_for))


@final
class _Rest(Coroutine[Any, None, None]):
    """A coroutine that already waits for something."""

    def __init__(self, coroutine: Coroutine[Any, None, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for
        self._has_begun = False

    def send(self, value: None) -> Any:
        if self._has_begun:
            return self._coroutine.send(value)
        self._has_begun = True
        waits_for, self._waits_for = self._waits_for, None
        return waits_for

    def throw(self, *error: Any) -> Any:
        if not self._has_begun:  # the task is cancelled before its first step, and knows nothing to cancel
            self._has_begun = True
            if isinstance(self._waits_for, asyncio.Future):
                self._waits_for.cancel()
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, None, None]:
        raise NotImplementedError("only a task runs this")
