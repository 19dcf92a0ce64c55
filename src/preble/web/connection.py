"""One client's connection: uvicorn's, with the bounds that it lacks.

uvicorn bounds how long a connection may be idle between requests, and leaves bodies to the application. Before the
application sees a request, a client could send headers without end, or nothing at all, and keep the connection for
ever. Here a head has to be small and to come in time. After it, a client could read nothing of its answer, and keep the
answer in memory for ever. Here it has to go on reading. And there is a number of connections that is not exceeded.

A wish for another protocol, on which uvicorn loses the request's body, is ignored. A client that has sent its request
and closed its sending half (`nc -N`) still gets its answer, and one that speaks HTTP/1.0 gets no chunks.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from math import inf

import httptools
import msgspec
import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from preble.web.http10 import UntilClose
from preble.web.tcp import bytes_in_socket, is_reset

MAX_HEAD_BYTES = 64 * 1024
"""Largest request line and headers together, give or take one read from the socket: four times what nginx takes."""
HEAD_S = 60.0
"""How long a connection may be without a request whose head is complete."""
SEND_S = 60.0
"""How long a client may take nothing of what is to be sent to it: what nginx allows. A slow one takes something."""
TELL_EVERY_S = 60.0
"""Between two log lines that say that connections are refused."""
FIRST_PROBE_S = 0.02
LONGEST_PROBE_S = 5.0
"""Between two looks at whether a client that has stopped sending still listens; doubled each time."""
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Clients ignore it. The machine of one that has closed answers with a reset."""


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
    _untaken_bytes = 0
    _wants_upgrade = False
    _timer: asyncio.TimerHandle | None = None
    _num_heads = 0
    _in_head = False
    _head_bytes = 0
    _is_refused = False
    _has_ended = False
    _probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit is not None and len(self.connections) > self.limit.most:
            self.limit.refused(self.loop.time())
            text = "too many connections; try again soon"
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too_many_connections", text, kind="service_unavailable")
            return
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._end_send_timer()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        head = self._num_heads
        self._unset_keepalive_if_required()
        self._parse(data)
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
        self._wants_upgrade = self.parser.should_upgrade()
        if self._wants_upgrade or self._refuse_bad_head():
            return
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = UntilClose(self.cycle)  # type: ignore[method-assign]

    def _refuse_bad_head(self) -> bool:
        """Refuse what the parser lets through and nobody can serve; says whether it did."""
        encodings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if encodings not in ([], [b"chunked"]):
            text = "no transfer encoding but `chunked` is understood; send the body as it is"
            self._refuse(HTTPStatus.NOT_IMPLEMENTED, "unsupported_transfer_encoding", text)
        elif num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            self._refuse(HTTPStatus.BAD_REQUEST, "invalid_host", f"a request has one Host header, not {num_hosts}")
        return self._is_refused

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not (self._wants_upgrade or self._is_refused):
            super().on_message_complete()

    # the parser

    def _parse(self, data: bytes) -> None:
        """Tell the parser, which tells us. A wish for another protocol is ignored, as HTTP allows.

        The parser ends at such a request's head, since what follows might be of the other protocol. So another one is
        given the request without the wish: Java's HttpClient asks for HTTP/2 with a body behind it.
        """
        rest = memoryview(data)
        try:
            while True:
                try:
                    self.parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    if self.parser.get_method() == b"CONNECT":
                        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed", "this server is no proxy")
                        return
                    head, rest = self._head_without_upgrade(), rest[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
                self.parser.feed_data(head)
        except httptools.HttpParserError:
            self.send_400_response("")

    def _head_without_upgrade(self) -> bytes:
        start = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([start, *lines, b"", b""])

    # the client reads on

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_progress()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._has_ended and not self._is_answering():
            self.transport.close()
        self._expect_progress()

    def _expect_progress(self) -> None:
        """From now on, until nothing is left to be sent or the application may go on writing."""
        self._end_send_timer()
        if self.transport.get_write_buffer_size():
            self._untaken_bytes = self._count_untaken()
            self._send_timer = self.loop.call_later(self.send_s, self._on_send_timer)

    def _end_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _on_send_timer(self) -> None:
        if self._is_answering() and not self.flow.write_paused and not self.transport.is_closing():
            self._end_send_timer()
        elif not self.transport.get_write_buffer_size() or self._count_untaken() < self._untaken_bytes:
            self._expect_progress()
        else:
            self.transport.abort()

    def _count_untaken(self) -> int:
        """Bytes that have been written and not arrived. The system's count too: it asks for more only once it is rid
        of a third of what it holds, which is megabytes, and takes minutes with a slow client."""
        return self.transport.get_write_buffer_size() + bytes_in_socket(self.transport)

    # the client has ended its half

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: its last request is complete and not answered yet.

        A client that has closed altogether looks the same at first, so it is probed until the answer begins; HTTP/1.0
        has nothing to probe with.
        """
        self._has_ended = True
        is_owed = self._is_answering() and not self._in_head and not self.cycle.more_body
        if not is_owed or self.scope["http_version"] == "1.0" or self.transport.is_closing():
            return False
        self._probe(FIRST_PROBE_S)
        return True

    def _probe(self, wait_s: float) -> None:
        if self.transport.is_closing():
            return
        if is_reset(self.transport):
            self.transport.abort()
            return
        if not self.pipeline and not self.cycle.response_started:
            self.transport.write(_PROBE)
        self._probe_timer = self.loop.call_later(wait_s, self._probe, min(2 * wait_s, LONGEST_PROBE_S))

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

    def _refuse(self, status: HTTPStatus, code: str, text: str, *, kind: str = "invalid_request_error") -> None:
        """Close the connection, with an answer in OpenAI's form unless another is on its way."""
        self._is_refused = True
        if not (self._is_answering() and self.cycle.response_started):
            fields = {"message": text, "type": kind, "param": None, "code": code}
            body = msgspec.json.encode({"error": fields})
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
        self._expect_progress()
