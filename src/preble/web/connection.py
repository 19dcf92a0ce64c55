"""One client's connection: uvicorn's, with the bounds that it lacks.

uvicorn bounds how long a connection may be idle between requests, and leaves bodies to the application. Before the
application sees a request, a client could send headers without end, or nothing at all, and keep the connection for
ever. Here a head has to be small and to come in time. After it, a client could read nothing of its answer, and keep the
answer in memory for ever. Here it has to go on reading. And there is a number of connections that is not exceeded.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from math import inf

import msgspec
import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Largest request line and headers together, give or take one read from the socket: four times what nginx takes."""
HEAD_S = 60.0
"""How long a connection may be without a request whose head is complete."""
SEND_S = 60.0
"""How long a client may take nothing of what is to be sent to it: what nginx allows."""
TELL_EVERY_S = 60.0
"""Between two log lines that say that connections are refused."""


class ConnectionLimit:
    """How many connections a server accepts at once; says so in the log where it refuses one, though not each time."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._told_at = -inf

    def refused(self, now: float) -> None:
        """A connection was refused. `now`: in seconds, not going back."""
        if now - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            structlog.get_logger().warning("connections_refused", most=self.most, hint="raise the limit of open files")


class BoundedConnection(HttpToolsProtocol):
    """A connection that is closed, with an answer where one helps, when a request's head is too large or too slow, when
    the client reads no further, or when there are too many."""

    head_s = HEAD_S
    send_s = SEND_S
    limit: ConnectionLimit | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _unsent_bytes = 0
    _is_refused = False
    _timer: asyncio.TimerHandle | None = None
    _num_heads = 0
    _in_head = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit is not None and len(self.connections) > self.limit.most:
            self.limit.refused(self.loop.time())
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too_many_connections", "too many connections; try again soon")
            return
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._end_send_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        head = self._num_heads
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head:
            # Bytes that came together with the request before do not count: nobody knows how many they are.
            if self._num_heads in (1, head):
                self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                text = f"the request line and headers have more than {MAX_HEAD_BYTES} bytes; send fewer"
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", text)
                return
        if self._in_head or not self._is_answering():
            self._arm()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_heads += 1
        self._head_bytes = 0
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._disarm()
        if not self.parser.should_upgrade():
            super().on_headers_complete()
        elif self._announces_body():
            # The parser takes what follows for another protocol's bytes: the body would be seen as an empty one.
            text = "this server speaks HTTP/1.1 only; send no `Upgrade` (Java's HttpClient: set version HTTP_1_1)"
            self._is_refused = True
            self._refuse(HTTPStatus.BAD_REQUEST, "upgrade_not_supported", text)
        else:
            super().on_headers_complete()
            self.cycle.keep_alive = False

    def _announces_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
            for name, value in self.headers
        )

    def on_message_complete(self) -> None:
        if not self._is_refused:
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """What uvicorn logs of a wish that may be ignored, twice."""

    # the client reads on

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_progress()

    def resume_writing(self) -> None:
        self._end_send_timer()
        super().resume_writing()

    def _expect_progress(self) -> None:
        self._end_send_timer()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self.send_s, self._on_no_room)

    def _end_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _on_no_room(self) -> None:
        self._send_timer = None
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._expect_progress()
        else:
            self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """What uvicorn calls when nothing has come for long; closing alone would wait for what is not read."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    # the head

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_s, self._on_late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_late(self) -> None:
        self._timer = None
        if self._is_answering():
            # The head of a request behind one that is being answered is not read on until the answer is complete.
            self._arm()
        elif self._in_head:
            text = f"the request line and headers did not arrive within {self.head_s:g} s"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", text)
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when it cannot parse what comes."""
        self._refuse(HTTPStatus.BAD_REQUEST, "invalid_http", "this is not an HTTP/1.1 request")

    def _refuse(self, status: HTTPStatus, code: str, text: str) -> None:
        """Close the connection, with an answer in OpenAI's form unless another is on its way."""
        if not (self._is_answering() and self.cycle.response_started):
            fields = {"message": text, "type": "invalid_request_error", "param": None, "code": code}
            body = msgspec.json.encode({"error": fields})
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
