"""One client's connection: an HTTP/1.1 on httptools' parser, with a limit on everything that a client can do.

A client could send headers without end, or nothing, and keep its connection; or read nothing of its answer, and keep
the answer in memory. Here a request's head must be small and arrive in time, a client must keep reading its answer, and
the number of connections is limited. An idle connection is closed.

Each request gets an `Answering`, which the server's `accept` makes. Requests of one connection are served one after the
other, in their order. HTTP upgrade requests are served as plain HTTP/1.1: Preble offers no other protocol. A client
that closes its sending half after its request (`nc -N`) still gets its answer. HTTP/1.0 gets no chunks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from http import HTTPStatus
from math import inf
from typing import cast
from urllib.parse import unquote

import httptools
import msgspec
import structlog

from preble.web.messages import CONTINUE, HeaderList, by_name
from preble.web.server.answering import Accept, Answering, RequestHead
from preble.web.server.connection_limit import Access, ConnectionLimit
from preble.web.server.tcp import bytes_in_socket, bytes_unread, is_half_closed, is_reset

MAX_HEAD_BYTES = 64 * 1024
"""The most bytes of request line and headers, plus at most one read from the socket; nginx takes a quarter. Also the
most between two pieces of a body, and after the last: a chunk's size may have an extension, and trailers may follow."""
HEAD_S = 60.0
"""How long a connection may last without a complete request head."""
PROBE_HEAD_S = 2.0
"""The same where only a probe is answered."""
LAST_HEAD_S = 2.0
"""The same when the server ends."""
SEND_S = 60.0
"""How long a client may read nothing of its answer (as in nginx). A slow client reads something."""
KEEP_ALIVE_S = 75.0
"""How long an idle connection is kept. Longer than the 60 s of common load balancers and than our own clients: then the
client closes it, and no request meets a closed connection."""
FIRST_PROBE_S = 0.02
LONGEST_PROBE_S = 5.0
"""Between two checks whether a client that has stopped sending still listens; doubled each time."""
INTERNAL_ERROR = "internal_error"
"""The code of an error that is a bug, in answers and in the log."""


class Shared:
    """What the connections of a server have in common. `opened`: called when a connection has opened."""

    def __init__(
        self, accept: Accept, limit: ConnectionLimit | None = None, opened: Callable[[], None] = lambda: None
    ) -> None:
        self.accept = accept
        self.limit = limit
        self.opened = opened
        self.connections: set[ClientConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        """Of requests: a server that stops waits for these, and cancels those that take too long."""
        self.default_headers: HeaderList = []
        """Of every answer."""
        self.is_ending = False
        """Whether the server stops: who connects now sends one request at most."""
        self.leaves_idle = False
        """Whether the end of the server leaves idle connections to their clients, who may be sending: they end with the
        next answer, or when they have been idle for long."""


class ClientConnection(asyncio.Protocol):
    """A connection that closes when a request's head is too large or too slow, when the client stops reading, or when
    there are too many connections. It sends an answer first where one helps."""

    head_s = HEAD_S
    send_s = SEND_S
    keep_alive_s = KEEP_ALIVE_S
    is_write_paused = False
    """Whether the client reads too slowly."""
    transport: asyncio.Transport
    _address = ""
    _newest: Answering | None = None
    """What answers the request whose head came last."""
    _served: Answering | None = None
    """What is being answered now: the newest, or one before it."""
    _send_by = _head_by = _idle_until = inf
    """When the client must have read something, sent a whole head, or used the connection again."""
    _untaken_bytes = 0
    _wants_upgrade = _is_http10 = _is_read_paused = False
    _num_heads = 0
    _in_head = False
    _has_taken = False
    """Whether one of the requests that have come together is served."""
    _bare_bytes = 0
    """Of a head, or without a byte of a body, that have come one after the other."""
    _is_refused = False
    _room = Access.NONE
    _has_ended = False
    _is_ending = False
    _probe_timer: asyncio.TimerHandle | None = None
    _url = b""

    def __init__(self, shared: Shared, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.shared = shared
        self._parser = self._new_parser()
        self._headers: HeaderList = []
        self._pieces: list[bytes] = []
        """Of a body: those of the read that is being parsed."""
        self._waiting: deque[Answering] = deque()
        """Requests that came before the one before them was answered, the oldest first."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        peer = transport.get_extra_info("peername")
        self._address = peer[0] if isinstance(peer, tuple) else ""
        self.shared.connections.add(self)
        self.shared.opened()
        if (limit := self.shared.limit) is not None:
            self._room = limit.enter(self._address, self.loop.time())
            if self._room is Access.NONE:
                self._refuse_for_want_of_room()
                return
            if self._room is Access.PROBES:
                self.head_s = PROBE_HEAD_S
        self._arm()
        if self.shared.is_ending:
            self.shutdown()

    def _refuse_for_want_of_room(self) -> None:
        text = "too many connections; try again soon"
        self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too_many_connections", text, kind="service_unavailable")

    def connection_lost(self, exc: Exception | None) -> None:
        self.shared.connections.discard(self)
        if self.shared.limit is not None:
            self.shared.limit.leave(self._address, self._room)
        self._disarm()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        served, self._served, self._newest = self._served, None, None
        self._waiting.clear()
        del self._parser  # it refers to this connection
        if served is not None:
            served.lost()

    def data_received(self, data: bytes) -> None:
        self._idle_until = inf
        self._has_taken = False
        self._bare_bytes += len(data)
        self._parse(data)
        self._pass_body_on()
        if self.transport.is_closing():
            return
        newest = self._newest
        if self._bare_bytes > MAX_HEAD_BYTES and (self._in_head or (newest is not None and newest.more_body)):
            what = "the request line and headers" if self._in_head else "trailers, or a chunk's extension,"
            text = f"{what} have more than {MAX_HEAD_BYTES} bytes; send fewer"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", text)
            return
        if self._in_head or ((newest is None or newest.response_complete) and self._idle_until == inf):
            self._arm()

    def shutdown(self) -> None:
        """End the connection: after the answer that runs, and after the request that its client has just sent.

        A client that has just connected is sending its request, which would be lost with the connection.
        """
        self._is_ending = True
        if self._newest is not None and not self._newest.response_complete:
            self._newest.keep_alive = False
            return
        if self.shared.leaves_idle:
            return
        if self._newest is not None and not bytes_unread(self.transport):
            self.transport.close()
            return
        self._disarm()
        self.head_s = LAST_HEAD_S
        self._arm()

    # the parser calls these

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._idle_until = inf  # it began when the request before was answered in this very read
        self._num_heads += 1
        if self._num_heads > 1:  # it came together with the request before, and how much of it is unknown
            self._bare_bytes = 0
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # nobody reads trailers
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._bare_bytes = 0
        self._head_by = inf
        self._is_http10 = self._parser.get_http_version() == "1.0"
        self._wants_upgrade = self._parser.should_upgrade()
        headers = dict(self._headers)
        if len(headers) < len(self._headers):  # some come more than once
            headers = by_name(self._headers)
        if self._wants_upgrade or self.transport.is_closing() or self._refuse_bad_head(headers):
            return  # a closing connection has answered a request that came with this one, and answers no more
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        head = RequestHead(
            self._parser.get_method().decode("ascii"),
            unquote(path) if "%" in path else path,
            headers,
            url.query or b"",
            self._is_http10,
            not self._is_http10 and self._parser.should_keep_alive() and not self._is_last,
            not self._is_http10 and headers.get(b"expect", b"").lower() == b"100-continue",
        )
        self._take(self.shared.accept(self, head))

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._pass_body_on()
        if not (self._wants_upgrade or self._is_refused) and self._newest is not None:
            self._newest.body_ended()

    def _pass_body_on(self) -> None:
        """Pass on what a read brought of a body in one piece: each of many tiny ones would take more than its size."""
        if pieces := self._pieces:
            self._bare_bytes = 0
            self._pieces = []
            if not self._is_refused and self._newest is not None:
                self._newest.received(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    @property
    def _is_last(self) -> bool:
        """Whether the connection ends with the answer to the request that has just come."""
        return self._room is Access.PROBES or self._is_ending

    def _refuse_bad_head(self, headers: Mapping[bytes, bytes]) -> bool:
        """Refuse a request that the parser accepts but that cannot be served. Return whether it did."""
        encodings = []
        if b"transfer-encoding" in headers:
            encodings = [value.strip().lower() for name, value in self._headers if name == b"transfer-encoding"]
        num_hosts = int(b"host" in headers)
        if len(headers) < len(self._headers):  # some come more than once
            num_hosts = [name for name, _ in self._headers].count(b"host")
        limit = self.shared.limit
        if self._room is Access.PROBES and limit and self._url.partition(b"?")[0] not in limit.probes:
            self._refuse_for_want_of_room()
        elif encodings not in ([], [b"chunked"]):
            text = "no transfer encoding but `chunked` is understood; send the body as it is"
            self._refuse(HTTPStatus.NOT_IMPLEMENTED, "unsupported_transfer_encoding", text)
        elif num_hosts > 1 or (num_hosts == 0 and self._parser.get_http_version() == "1.1"):
            self._refuse(HTTPStatus.BAD_REQUEST, "invalid_host", f"a request has one Host header, not {num_hosts}")
        elif not self._url.isascii() or (
            not self._url.startswith(b"/") and httptools.parse_url(self._url).path is None
        ):
            self._refuse_bytes()
        return self._is_refused

    # one request after the other

    def _take(self, answering: Answering) -> None:
        """Serve a request now, or once those before it are answered: of those that come together, one in each turn of
        the event loop."""
        before, self._newest = self._newest, answering
        if before is not None and not before.response_complete:
            self.pause_reading()
            self._waiting.append(answering)
        elif self._has_taken:
            self.pause_reading()
            self._begin_soon(answering)
        else:
            self._has_taken = True
            self._served = answering
            answering.start()

    def _begin_soon(self, answering: Answering) -> None:
        self._served = answering
        self.loop.call_soon(self._begin, answering)  # not at once: each might complete the one before

    def _begin(self, answering: Answering) -> None:
        if self._served is answering:
            if not self._waiting:
                self.resume_reading()  # the rest of its body
            try:
                answering.start()
            except Exception as error:  # noqa: BLE001 (as in the parser's callbacks)
                self.fail(error)

    def on_response_complete(self, answering: Answering) -> None:
        """An answer is complete: close after it, begin the next, or wait for a request."""
        answering.response_complete = True
        if not answering.keep_alive:
            self.transport.close()
        self._served = None
        if not self.transport.is_closing():
            if self._waiting:  # what has come is served before more is read
                self._begin_soon(self._waiting.popleft())
            else:
                if self._is_read_paused:
                    self.resume_reading()
                self._idle_until = self.loop.time() + self.keep_alive_s
        if self._has_ended and not self._is_answering():
            self.transport.close()
        self._send_by = inf
        if self.transport.get_write_buffer_size():
            self._expect_progress()

    def pause_reading(self) -> None:
        """Read nothing more for now."""
        if not self._is_read_paused:
            self._is_read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self._is_read_paused:
            self._is_read_paused = False
            self.transport.resume_reading()

    def is_client_half_closed(self) -> bool:
        """Return whether the client has ended its half while nothing is read: it may have left."""
        return self._is_read_paused and is_half_closed(self.transport)

    def stop(self) -> bool:
        """Stop: answer what can be answered now. Return whether a request was being served."""
        is_answering = self._is_answering()
        self._waiting.clear()  # nothing begins any more
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
                    self._parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    if self._parser.get_method() == b"CONNECT":
                        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed", "this server is no proxy")
                        return
                    head, rest = self._head_without_upgrade(), rest[upgrade.args[0] :]
                self._parser = self._new_parser()
                self._parser.feed_data(head)
        except httptools.HttpParserCallbackError as error:
            self.fail(error.__context__)
        except httptools.HttpParserError:
            self._refuse_bytes()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # What follows a request that closes the connection is ignored, not refused: its answer may still be on its way.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def fail(self, error: BaseException | None) -> None:
        """End the connection after an exception: the parser's, which a URL may raise in a callback, or a bug."""
        if isinstance(error, httptools.HttpParserError):
            self._refuse_bytes()
            return
        structlog.get_logger().error("request_failed", error=str(error), code=INTERNAL_ERROR, exc_info=error)
        text = "the server failed; its log has the details"
        self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, INTERNAL_ERROR, text, kind=INTERNAL_ERROR)

    def _head_without_upgrade(self) -> bytes:
        start = b"%s %s HTTP/%s" % (self._parser.get_method(), self._url, self._parser.get_http_version().encode())
        lines = [b"%s: %s" % header for header in self._headers if header[0] != b"upgrade"]
        return b"\r\n".join([start, *lines, b"", b""])

    # the client reads on

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self._expect_progress()
        if self._served is not None:
            self._served.on_paused()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        if self._served is not None:
            self._served.resumed()

    def _expect_progress(self) -> None:
        """Start the clock; it runs until everything is sent or more may be written."""
        self._send_by = inf
        if self.transport.get_write_buffer_size():
            self._untaken_bytes = self._count_untaken()
            self._send_by = self.loop.time() + self.send_s

    def _on_send_late(self) -> None:
        if self._is_answering() and not self.is_write_paused and not self.transport.is_closing():
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

    def eof_received(self) -> bool:
        """Return whether the connection stays open: its last request is complete, and its answer has not begun.

        A client that has closed both halves looks the same at first, so it is probed until the answer begins. HTTP/1.0
        offers nothing to probe with, nor does an answer that has begun: such clients count as gone.
        """
        self._has_ended = True
        newest = self._newest
        is_owed = newest is not None and not (newest.response_complete or newest.more_body or self._in_head)
        if not is_owed or not self._has_unbegun() or self._is_http10 or self.transport.is_closing():
            return False
        self._probe(FIRST_PROBE_S)
        return True

    def _probe(self, wait_s: float) -> None:
        if self.transport.is_closing():
            return
        if is_reset(self.transport):
            self.transport.abort()
            return
        if not self._waiting and self._has_unbegun():
            # Clients ignore it. The machine of a client that has closed answers with a reset.
            self.transport.write(CONTINUE)
        self._probe_timer = self.loop.call_later(wait_s, self._probe, min(2 * wait_s, LONGEST_PROBE_S))

    def _has_unbegun(self) -> bool:
        """Return whether an answer has not begun."""
        return bool(self._waiting) or (self._newest is not None and not self._newest.response_started)

    # the head

    def _is_answering(self) -> bool:
        return self._newest is not None and not self._newest.response_complete

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

    def _refuse_bytes(self) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, "invalid_http", "this is not an HTTP/1.1 request")

    def _refuse(self, status: HTTPStatus, code: str, text: str, *, kind: str = "invalid_request_error") -> None:
        """Close the connection, with an error in OpenAI's form unless another answer has begun."""
        self._is_refused = True
        newest = self._newest
        is_answered = newest is not None and newest.more_body and newest.response_complete
        if not is_answered and (self._served is None or not self._served.response_started):
            fields = {"message": text, "type": kind, "param": None, "code": code}
            body = msgspec.json.encode({"error": fields})
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
        self._expect_progress()
