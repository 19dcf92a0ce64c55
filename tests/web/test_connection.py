"""What a client can do to a connection before its request reaches the application."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import select
import socket
import sys
import termios
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from preble.web.server import connection
from preble.web.server.answering import Accept
from preble.web.server.awaited import AwaitedRequest, ClientGone
from preble.web.server.connection import MAX_HEAD_BYTES, ClientConnection, Shared
from preble.web.server.connection_limit import Access, ConnectionLimit
from preble.web.server.listening import listen
from preble.web.server.server import Server
from support.waiting import PATIENCE_S, eventually

HEALTHY = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Application:
    """Answers each request with its number of body bytes, once the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.started = 0

    async def __call__(self, request: AwaitedRequest) -> None:
        self.started += 1
        size = 0
        while piece := await request.piece():
            size += len(piece)
        await self.gate.wait()
        request.reply(200, [], b"%d" % size)


def by_task(app: Callable[[AwaitedRequest], Coroutine[Any, Any, None]]) -> Accept:
    """What has a coroutine answer each request."""
    return lambda connection, head: AwaitedRequest(connection, head, app)


@asynccontextmanager
async def serving(app: Any, *, send_buffer_bytes: int | None = None, **options: Any) -> AsyncIterator[int]:
    """The port of a server that runs within the context. `send_buffer_bytes`: what the system takes for a client."""
    with listen("127.0.0.1", 0) as sock:
        if send_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        server = Server(by_task(app), grace_s=1, **options)
        task = asyncio.create_task(server.serve([sock]))
        await server.listening.wait()
        try:
            yield sock.getsockname()[1]
        finally:
            server.stop()
            await task


class Peer:
    """The client's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Send, though the server may have closed already."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except ConnectionError:
            pass

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer. Raises: IncompleteReadError: the server closed instead."""
        async with asyncio.timeout(PATIENCE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            return int(head.split()[1]), await self.reader.readexactly(int(length.split(b":")[1]))

    async def end(self) -> bytes:
        """What comes until the server closes."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head has to be there at once."""
    monkeypatch.setattr(ClientConnection, "head_s", 0.05)  # ships 60 s


@pytest.mark.parametrize("piece", [b"h: " + b"v" * 4096 + b"\r\n", b"v" * 4096], ids=["many headers", "one header"])
async def test_headers_without_end_are_refused(piece: bytes) -> None:
    app = Application()
    async with serving(app) as port, connected(port) as peer:
        await peer.send(b"GET / HTTP/1.1\r\nfirst: ")
        for _ in range(200):
            await peer.send(piece)
        said = await peer.end()
        # A connection that is closed on what it has not read may lose the answer on the way.
        assert said == b"" or said.startswith(b"HTTP/1.1 431 ")
    assert app.started == 0


async def test_too_large_a_head_is_answered_in_openais_form() -> None:
    async with serving(Application()) as port, connected(port) as peer:
        # Not a byte more than is too much: an answer to a client that is still sending can get lost.
        await peer.send(b"GET / HTTP/1.1\r\nh: ".ljust(MAX_HEAD_BYTES + 1, b"v"))
        status, body = await peer.answer()
        assert (status, json.loads(body)["error"]["code"]) == (431, "headers_too_large")


async def test_a_large_body_is_no_large_head() -> None:
    async with serving(Application()) as port, connected(port) as peer:
        for _ in range(2):
            await peer.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + b"b" * 1_000_000)
            assert await peer.answer() == (200, b"1000000")


@pytest.mark.usefixtures("hasty")
async def test_a_connection_that_sends_nothing_is_closed() -> None:
    async with serving(Application()) as port, connected(port) as peer:
        assert await peer.end() == b""


@pytest.mark.usefixtures("hasty")
async def test_a_head_that_does_not_arrive_is_given_up() -> None:
    async with serving(Application()) as port, connected(port) as peer:
        await peer.send(b"GET / HTTP/1.1\r\nhost")
        status, body = await peer.answer()
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        assert await peer.end() == b""


@pytest.mark.usefixtures("hasty")
async def test_blank_lines_after_an_answer_do_not_keep_a_connection() -> None:
    async with serving(Application()) as port, connected(port) as peer:
        await peer.send(HEALTHY)
        assert (await peer.answer())[0] == 200
        await peer.send(b"\r\n")
        assert await peer.end() == b""


@pytest.mark.usefixtures("hasty")
async def test_a_request_that_runs_long_is_not_cut_off_even_with_half_a_head_behind_it() -> None:
    app = Application()
    app.gate.clear()
    async with serving(app) as port, connected(port) as peer, connected(port) as impatient:
        await peer.send(HEALTHY + b"GET / HT")
        await eventually(lambda: app.started == 1, "the application has the first request")
        # Later, and closed: so the other's time is over too.
        assert await impatient.end() == b""
        app.gate.set()
        assert (await peer.answer())[0] == 200
        assert (await peer.answer())[0] == 408


async def test_several_requests_in_one_piece_are_answered_in_order() -> None:
    async with serving(Application()) as port, connected(port) as peer:
        posts = [b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (n, b"b" * n) for n in (1, 2, 3)]
        await peer.send(b"".join(posts))
        assert [await peer.answer() for _ in posts] == [(200, b"1"), (200, b"2"), (200, b"3")]


class Endless:
    """Answers without end, and notes when the client is gone."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.is_over = False

    async def __call__(self, request: AwaitedRequest) -> None:
        request.begin(200, [])
        with contextlib.suppress(ClientGone), request.unless_gone():
            while True:
                request.write(bytes(65536))
                await request.drained()
                self.sent_bytes += 65536
        self.is_over = True


async def test_a_client_that_reads_nothing_of_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientConnection, "send_s", 0.05)  # ships 60 s
    app = Endless()
    async with serving(app) as port, connected(port) as peer:
        await peer.send(HEALTHY)
        await eventually(lambda: app.is_over, "the application hears that the client is gone")
        assert app.sent_bytes > 0


async def test_a_client_that_reads_no_further_at_its_answers_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientConnection, "send_s", 0.05)  # ships 60 s

    async def app(request: AwaitedRequest) -> None:
        request.reply(200, [(b"connection", b"close")], bytes(60_000))

    # Too little to wait for room, and more than the system takes.
    async with serving(app, send_buffer_bytes=4096, most_connections=1) as port:
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect(("127.0.0.1", port))
            silent.sendall(HEALTHY)
            await eventually(lambda: _is_served(port), "there is room again")


class FakeLoop:
    """Its time is what the test sets."""

    now = 0.0

    def time(self) -> float:
        return self.now


class FullTransport(asyncio.Transport):
    """The sending end of a real connection, with more to be sent than there is room for."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__({"socket": sock})
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return 100_000

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a socket does not say how much has not arrived")
async def test_a_client_that_reads_slowly_is_not_cut_off_until_it_stops() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.getsockname())
        sending, _ = server.accept()
        with sending:
            sending.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sending.send(bytes(65536))
            loop, transport = FakeLoop(), FullTransport(sending)
            connection = ClientConnection(Shared(by_task(Application())), cast(Any, loop))
            connection.connection_made(transport)
            connection.pause_writing()
            connection._disarm()  # it has sent its head
            for _ in range(3):
                loop.now += connection.send_s
                _read_until_it_is_noticed(client, sending)
                connection.on_time(loop.now)
                assert not transport.is_aborted
            connection.on_time(loop.now + connection.send_s / 2)
            assert not transport.is_aborted
            connection.on_time(loop.now + connection.send_s)
            assert transport.is_aborted


def _read_until_it_is_noticed(client: socket.socket, sending: socket.socket) -> None:
    """Read, until the sender's system has heard of it; it still has no room for more."""
    before = _unconfirmed_bytes(sending)
    client.settimeout(PATIENCE_S)
    while _unconfirmed_bytes(sending) == before:
        client.recv(1024)
    assert not select.select([], [sending], [], 0)[1]


def _unconfirmed_bytes(sock: socket.socket) -> int:
    return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)


async def test_a_connection_too_many_is_refused_and_one_that_goes_makes_room() -> None:
    app = Application()
    with capture_logs() as logs:
        async with serving(app, most_connections=2) as port, connected(port) as one:
            async with connected(port) as two, connected(port) as three:
                for peer in (one, two):
                    await peer.send(HEALTHY)
                    assert (await peer.answer())[0] == 200
                status, body = await three.answer()
                assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")
            await eventually(lambda: _is_served(port), "there is room again")
    assert [line["event"] for line in logs] == ["connections_refused"]


async def test_probes_are_answered_where_there_is_no_room_for_others() -> None:
    async with serving(Application(), most_connections=1, probes=(b"/health",)) as port, connected(port) as one:
        await one.send(HEALTHY)
        assert (await one.answer())[0] == 200
        async with connected(port) as probe, connected(port) as other:
            await probe.send(b"GET /health?now HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await probe.answer())[0] == 200
            assert await probe.end() == b"", "one answer, and it makes room"
            await other.send(HEALTHY)
            status, body = await other.answer()
            assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")


async def test_what_is_kept_for_probes_is_not_kept_by_silent_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PROBE_HEAD_S", 0.05)  # ships 2 s
    async with serving(Application(), most_connections=1, probes=(b"/health",)) as port, connected(port) as one:
        await one.send(HEALTHY)
        assert (await one.answer())[0] == 200
        async with connected(port) as silent:
            assert await silent.end() == b""


def test_one_address_has_half_of_the_connections_at_most() -> None:
    limit = ConnectionLimit(200, probes=(b"/health",))
    assert [limit.enter("greedy", 0.0) for _ in range(100)] == [Access.ALL] * 100
    assert [limit.enter("greedy", 0.0) for _ in range(5)] == [Access.PROBES] * 4 + [Access.NONE]
    assert limit.enter("other", 0.0) is Access.ALL
    limit.leave("greedy", Access.ALL)
    assert limit.enter("greedy", 0.0) is Access.ALL


def test_a_limit_forgets_addresses_that_have_gone() -> None:
    limit = ConnectionLimit(2)
    for number in range(1000):
        limit.leave(str(number), limit.enter(str(number), 0.0))
    assert not any(limit._of.values())


async def _is_served(port: int) -> bool:
    async with connected(port) as peer:
        await peer.send(HEALTHY)
        return (await peer.answer())[0] == 200


WISH = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAA\r\n"
"""What Java's HttpClient adds to its first request."""


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n%s\r\n", b"0"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n%s\r\nabc", b"3"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n%s\r\n5\r\nabcde\r\n0\r\n\r\n", b"5"),
    ],
    ids=["no body", "body", "chunks"],
)
@pytest.mark.parametrize("piece_bytes", [1, 1000])
async def test_an_upgrade_request_is_ignored(request_: bytes, answer: bytes, piece_bytes: int) -> None:
    async with serving(Application()) as port, connected(port) as peer:
        sent = (request_ % WISH) * 2 + HEALTHY
        for start in range(0, len(sent), piece_bytes):
            await peer.send(sent[start : start + piece_bytes])
        assert [await peer.answer() for _ in range(3)] == [(200, answer), (200, answer), (200, b"0")]


async def test_an_upgrade_request_does_not_hide_what_is_not_http() -> None:
    app = Application()
    async with serving(app) as port, connected(port) as peer:
        await peer.send(b"GET no path HTTP/1.1\r\nhost: x\r\n" + WISH + b"\r\n")
        status, body = await peer.answer()
        assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_http")
    assert app.started == 0


@pytest.mark.parametrize("target", [b"elsewhere:443", b"/"])
async def test_nothing_is_tunnelled(target: bytes) -> None:
    app = Application()
    async with serving(app) as port, connected(port) as peer:
        await peer.send(b"CONNECT " + target + b" HTTP/1.1\r\nhost: x\r\n\r\n" + HEALTHY)
        status, body = await peer.answer()
        assert (status, json.loads(body)["error"]["code"]) == (405, "method_not_allowed")
        assert await peer.end() == b""
    assert app.started == 0


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad\x01name: v\r\n\r\n",
    ],
    ids=["tls", "negative length", "two lengths", "control character"],
)
async def test_what_is_not_http_is_refused_in_openais_form(sent: bytes) -> None:
    app = Application()
    async with serving(app) as port, connected(port) as peer:
        await peer.send(sent)
        status, body = await peer.answer()
        assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_http")
        assert await peer.end() == b""
    assert app.started == 0


class Streaming:
    """Answers in two pieces, of a length that it does not state."""

    async def __call__(self, request: AwaitedRequest) -> None:
        request.begin(200, [(b"content-type", b"text/plain")])
        request.write(b"one ")
        request.write(b"two")
        request.end()


@pytest.mark.parametrize("app", [Streaming(), Application()], ids=["without length", "with length"])
async def test_http_1_0_gets_no_chunks(app: Any) -> None:
    async with serving(app) as port, connected(port) as peer:
        await peer.send(b"GET / HTTP/1.0\r\n\r\n")
        head, _, body = (await peer.end()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body == (b"one two" if isinstance(app, Streaming) else b"0")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"host: x\r\ntransfer-encoding: gzip, chunked\r\n", 501),
        (b"host: x\r\ntransfer-encoding: chunked, chunked\r\n", 400),
        (b"host: x\r\nhost: y\r\ntransfer-encoding: chunked\r\n", 400),
        (b"transfer-encoding: chunked\r\n", 400),
    ],
)
async def test_heads_that_nobody_can_serve_are_refused(headers: bytes, status: int) -> None:
    app = Application()
    async with serving(app) as port, connected(port) as peer:
        await peer.send(b"POST / HTTP/1.1\r\n" + headers + b"\r\n3\r\nabc\r\n0\r\n\r\n")
        assert (await peer.answer())[0] == status
        assert await peer.end() == b""
    assert app.started == 0


async def test_a_server_that_ends_may_be_hurried_while_it_waits() -> None:
    app = Application()
    app.gate.clear()
    with listen("127.0.0.1", 0) as sock:
        server = Server(by_task(app), grace_s=3600)
        task = asyncio.create_task(server.serve([sock]))
        await server.listening.wait()
        async with connected(sock.getsockname()[1]) as peer:
            await peer.send(HEALTHY)
            await eventually(lambda: app.started == 1)
            server.stop()
            server.hurry(within_s=0.01)
            async with asyncio.timeout(PATIENCE_S):
                await task
