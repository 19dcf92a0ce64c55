"""One client's connection: uvicorn's, with the limits that uvicorn lacks, and requests that are served by callbacks.

uvicorn limits only how long a connection may be idle between requests. A client could still send headers without end,
or nothing, and keep its connection; or read nothing of its answer, and keep the answer in memory. Here a request's head
must be small and arrive in time, a client must keep reading its answer, and the number of connections is limited.

HTTP upgrade requests are served as plain HTTP/1.1: Preble offers no other protocol, and uvicorn would drop the body.
A client that closes its sending half after its request (`nc -N`) still gets its answer. HTTP/1.0 gets no chunks.

Callbacks (`answering`) serve a POST that `accept` takes; every other request is the application's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from math import inf
from typing import Any
from urllib.parse import unquote

import httptools
import msgspec
import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from preble.web.heads import HeaderList, by_name
from preble.web.server.answering import Accept, Answering, RequestHead
from preble.web.server.connection_limit import Access, ConnectionLimit
from preble.web.server.http10 import UntilClose
from preble.web.server.tcp import bytes_in_socket, bytes_unread, is_half_closed, is_reset

MAX_HEAD_BYTES = 64 * 1024
"""The most bytes of request line and headers, plus at most one read from the socket; nginx takes a quarter."""
HEAD_S = 60.0
"""How long a connection may last without a complete request head."""
PROBE_HEAD_S = 2.0
"""The same where only a probe is answered."""
LAST_HEAD_S = 2.0
"""The same when the server ends."""
SEND_S = 60.0
"""How long a client may read nothing of its answer (as in nginx). A slow client reads something."""
FIRST_PROBE_S = 0.02
LONGEST_PROBE_S = 5.0
"""Between two checks whether a client that has stopped sending still listens; doubled each time."""
BODY_OVER = "preble.body_over"
"""In the scope: an event that is set when the connection is over, and by the application when it has the whole body."""
INTERNAL_ERROR = "internal_error"
"""The code of an error that is a bug, in answers and in the log."""
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Clients ignore it. The machine of a client that has closed answers with a reset."""


class BoundedConnection(HttpToolsProtocol):
    """A connection that closes when a request's head is too large or too slow, when the client stops reading, or when
    there are too many connections. It sends an answer first where one helps."""

    head_s = HEAD_S
    send_s = SEND_S
    limit: ConnectionLimit | None = None
    accept: Accept | None = None
    """Says which POSTs are served by callbacks."""
    opened: Callable[[], None] | None = None
    """Called when a connection has opened."""
    leaves_idle = False
    """Whether the end of the server leaves idle connections to their clients, who may be sending: they end with the
    next answer, or when they have been idle for long."""
    _served: Answering | None = None
    """The request that is served now, if it is by callbacks."""
    _send_by = _head_by = _idle_until = inf
    """When the client must have read something, sent a whole head, or used the connection again."""
    _untaken_bytes = 0
    _wants_upgrade = _is_http10 = False
    _num_heads = 0
    _in_head = False
    _has_taken = False
    """Whether one of the requests that have come together is served."""
    _head_bytes = 0
    _is_refused = False
    _room = Access.NONE
    _has_ended = False
    _is_ending = False
    _probe_timer: asyncio.TimerHandle | None = None
    _body_over: asyncio.Event | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.opened is not None:
            self.opened()
        if self.limit is not None:
            self._room = self.limit.enter(self._address, self.loop.time())
            if self._room is Access.NONE:
                self._refuse_for_want_of_room()
                return
            if self._room is Access.PROBES:
                self.head_s = PROBE_HEAD_S
        self._arm()

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _refuse_for_want_of_room(self) -> None:
        text = "too many connections; try again soon"
        self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too_many_connections", text, kind="service_unavailable")

    def connection_lost(self, exc: Exception | None) -> None:
        if self.limit is not None:
            self.limit.leave(self._address, self._room)
        self._disarm()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        served, self._served = self._served, None
        if isinstance(self.cycle, Answering):
            self.cycle = None  # type: ignore[assignment]
        self.pipeline.clear()
        super().connection_lost(exc)
        if self._body_over is not None:
            self._body_over.set()
        if served is not None:
            served.lost()

    def data_received(self, data: bytes) -> None:
        head = self._num_heads
        self._idle_until = inf
        self._has_taken = False
        self._parse(data)
        if self.transport.is_closing():
            return
        if self._in_head:
            # Bytes that arrived together with the previous request do not count: their number is unknown.
            if self._num_heads in (1, head):
                self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                text = f"the request line and headers have more than {MAX_HEAD_BYTES} bytes; send fewer"
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", text)
                return
        if self._in_head or (not self._is_answering() and self._idle_until == inf):
            self._arm()

    def shutdown(self) -> None:
        """End the connection: after the answer that runs, and after the request that its client has just sent.

        A client that has just connected is sending its request, which would be lost with the connection.
        """
        self._is_ending = True
        if self.leaves_idle and not self._is_answering():
            return
        if self._is_answering() or not (self.cycle is None or bytes_unread(self.transport)):
            super().shutdown()
            return
        self._disarm()
        self.head_s = LAST_HEAD_S
        self._arm()

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self._idle_until = inf  # it began when the request before was answered in this very read
        self._num_heads += 1
        self._head_bytes = 0
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_by = inf
        self._is_http10 = self.parser.get_http_version() == "1.0"
        self._wants_upgrade = self.parser.should_upgrade()
        headers = by_name(self.headers)
        if self._wants_upgrade or self.transport.is_closing() or self._refuse_bad_head(headers):
            return  # a closing connection has answered a request that came with this one, and answers no more
        answering = self._accepted(headers)
        if answering is not None:
            self._take(answering)
        else:
            self._pass_to_application(headers)

    def _pass_to_application(self, headers: Mapping[bytes, bytes]) -> None:
        url, pairs = self.url, self.headers
        super().on_message_begin()  # makes the scope, which other requests do without
        self.url = url
        self.headers += pairs
        self.expect_100_continue = headers.get(b"expect", b"").lower() == b"100-continue"
        self._body_over = self.scope[BODY_OVER] = asyncio.Event()  # type: ignore[literal-required]
        super().on_headers_complete()
        if self._is_last:
            self.cycle.keep_alive = False
        if self._is_http10:
            self.cycle.send = UntilClose(self.cycle)  # type: ignore[method-assign]

    @property
    def _is_last(self) -> bool:
        """Whether the connection ends with the answer to the request that has just come."""
        return self._room is Access.PROBES or self._is_ending

    def _refuse_bad_head(self, headers: Mapping[bytes, bytes]) -> bool:
        """Refuse a request that the parser accepts but that cannot be served. Return whether it did."""
        encodings = []
        if b"transfer-encoding" in headers:
            encodings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        num_hosts = int(b"host" in headers)
        if len(headers) < len(self.headers):  # some come more than once
            num_hosts = [name for name, _ in self.headers].count(b"host")
        if (
            self._room is Access.PROBES
            and self.limit is not None
            and self.url.partition(b"?")[0] not in self.limit.probes
        ):
            self._refuse_for_want_of_room()
        elif encodings not in ([], [b"chunked"]):
            text = "no transfer encoding but `chunked` is understood; send the body as it is"
            self._refuse(HTTPStatus.NOT_IMPLEMENTED, "unsupported_transfer_encoding", text)
        elif num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            self._refuse(HTTPStatus.BAD_REQUEST, "invalid_host", f"a request has one Host header, not {num_hosts}")
        elif not self.url.startswith(b"/") and httptools.parse_url(self.url).path is None:
            self.send_400_response("")
        return self._is_refused

    def on_body(self, body: bytes) -> None:
        if self._is_refused:
            return
        if isinstance(self.cycle, Answering):
            self.cycle.received(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._wants_upgrade or self._is_refused:
            return
        if isinstance(self.cycle, Answering):
            self.cycle.body_ended()
        else:
            super().on_message_complete()

    # requests that are served by callbacks

    def _accepted(self, headers: Mapping[bytes, bytes]) -> Answering | None:
        if self.accept is None or self.parser.get_method() != b"POST":
            return None
        path = httptools.parse_url(self.url).path.decode("ascii")
        head = RequestHead(
            unquote(path) if "%" in path else path,
            headers,
            self._is_http10,
            not self._is_http10 and self.parser.should_keep_alive() and not self._is_last,
        )
        return self.accept(self, head)

    def _take(self, answering: Answering) -> None:
        """Serve a request now, or once those before it are answered: of those that come together, one in each turn of
        the event loop."""
        before: Any = self.cycle
        self.cycle = answering  # type: ignore[assignment]
        if before is not None and not before.response_complete:
            self.flow.pause_reading()
            self.pipeline.appendleft((answering, self.app))  # type: ignore[arg-type]
        elif self._has_taken:
            self.flow.pause_reading()
            self._start_asgi_task(answering, self.app)
        else:
            self._has_taken = True
            self._served = answering
            answering.start()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Begin to serve a request that has waited for those before it; uvicorn calls this."""
        if isinstance(cycle, Answering):
            self._served = cycle
            self.loop.call_soon(self._start, cycle)  # not at once: each might complete the one before
        else:
            super()._start_asgi_task(cycle, app)

    def _start(self, answering: Answering) -> None:
        if self._served is answering:
            if not self.pipeline:
                self.flow.resume_reading()  # the rest of its body
            try:
                answering.start()
            except Exception as error:  # noqa: BLE001 (as in the parser's callbacks)
                self._on_callback_error(error)

    @property
    def is_write_paused(self) -> bool:
        """Whether the client reads too slowly."""
        return self.flow.write_paused

    @property
    def default_headers(self) -> HeaderList:
        """Of every answer."""
        return self.server_state.default_headers

    def stop(self) -> bool:
        """The server ends: answer what is served by callbacks now. Return whether a request was being served."""
        is_answering = self._is_answering()
        self.pipeline.clear()  # nothing begins any more
        if self._served is not None:
            self._served.keep_alive = False
            self._served.on_stop()
        return is_answering

    def on_time(self, now: float) -> None:
        """Act on what is late; the server calls this a few times a second, since a timer for each costs more."""
        if now >= self._head_by:
            self._on_late()
        if now >= self._send_by:
            self._on_send_late()
        if now >= self._idle_until:
            self.transport.close()
        if self._served is not None:
            self._served.on_time(now)
        elif self._takes_no_body() and is_half_closed(self.transport):
            self.flow.resume_reading()  # until we learn that the client has left, or has sent the rest

    # the parser

    def _parse(self, data: bytes) -> None:
        """Feed the parser, which calls us back. An upgrade header is ignored, as HTTP allows.

        The parser stops at the head of such a request, because the other protocol might follow. So a second parser gets
        the request without the header: Java's HttpClient asks for HTTP/2 and sends a body.
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
        except httptools.HttpParserCallbackError as error:
            self._on_callback_error(error.__context__)
        except httptools.HttpParserError:
            self.send_400_response("")

    def _on_callback_error(self, error: BaseException | None) -> None:
        """An exception has escaped a callback, and the parser goes no further: the URL's, or a bug."""
        if isinstance(error, httptools.HttpParserError):
            self.send_400_response("")
            return
        structlog.get_logger().error("request_failed", error=str(error), code=INTERNAL_ERROR, exc_info=error)
        text = "the server failed; its log has the details"
        self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, INTERNAL_ERROR, text, kind=INTERNAL_ERROR)

    def _head_without_upgrade(self) -> bytes:
        start = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([start, *lines, b"", b""])

    # the client reads on

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_progress()
        if self._served is not None:
            self._served.paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._served is not None:
            self._served.resumed()

    def on_response_complete(self) -> None:
        """In place of uvicorn's, which makes a timer for each answer."""
        self._served = None
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
            else:
                self._idle_until = self.loop.time() + self.timeout_keep_alive
        if self._has_ended and not self._is_answering():
            self.transport.close()
        self._expect_progress()

    def _expect_progress(self) -> None:
        """Start the clock; it runs until everything is sent or the application may write again."""
        self._send_by = inf
        if self.transport.get_write_buffer_size():
            self._untaken_bytes = self._count_untaken()
            self._send_by = self.loop.time() + self.send_s

    def _on_send_late(self) -> None:
        if self._is_answering() and not self.flow.write_paused and not self.transport.is_closing():
            self._send_by = inf
        elif not self.transport.get_write_buffer_size() or self._count_untaken() < self._untaken_bytes:
            self._expect_progress()
        else:
            self.transport.abort()

    def _count_untaken(self) -> int:
        """Return the bytes that were written and have not arrived, those in the system's buffer included.

        The system asks for more only when a third of its buffer is free. That is megabytes, and minutes for a slow
        client.
        """
        return self.transport.get_write_buffer_size() + bytes_in_socket(self.transport)

    # the client has ended its half

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open: its last request is complete, and its answer has not begun.

        A client that has closed both halves looks the same at first, so it is probed until the answer begins. HTTP/1.0
        offers nothing to probe with, nor does an answer that has begun: such clients count as gone.
        """
        self._has_ended = True
        is_owed = self._is_answering() and not self._in_head and not self.cycle.more_body
        is_owed = is_owed and (bool(self.pipeline) or not self.cycle.response_started)
        if not is_owed or self._is_http10 or self.transport.is_closing():
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

    def _takes_no_body(self) -> bool:
        """Whether nothing is read because the application does not take the body."""
        return self.flow is not None and self.flow.read_paused and self._is_answering() and self.cycle.more_body

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _arm(self) -> None:
        if self._head_by == inf:
            self._head_by = self.loop.time() + self.head_s

    def _disarm(self) -> None:
        self._head_by = inf

    def _on_late(self) -> None:
        self._disarm()
        if self._is_answering():
            # The head of a pipelined request is read only when the answer before it is complete.
            self._arm()
        elif self._in_head:
            text = f"the request line and headers did not arrive within {self.head_s:g} s"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", text)
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that uvicorn cannot parse; uvicorn calls this."""
        self._refuse(HTTPStatus.BAD_REQUEST, "invalid_http", "this is not an HTTP/1.1 request")

    def _refuse(self, status: HTTPStatus, code: str, text: str, *, kind: str = "invalid_request_error") -> None:
        """Close the connection, with an error in OpenAI's form unless another answer has begun."""
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
