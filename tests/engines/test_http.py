"""What a misbehaving server does to the HTTP client, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from preble.core.types import ReplicaId
from preble.engines.http import HttpClient, HttpTimeouts
from preble.errors import ConfigError, EngineGone, EngineProtocolError, EngineRefused, EngineTimeout
from preble.web.client import pool
from support.waiting import eventually

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
ANSWER = HEAD + b"Content-Length: 2\r\n\r\nok"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BEGUN = CHUNKED + b"2\r\nhi\r\n"
SHORT = HttpTimeouts(first_byte_s=0.2, idle_s=0.2, control_s=0.2)
FOREVER = 3600.0


class Peer:
    """The server's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.requests: list[bytes] = []

    async def request(self) -> bytes:
        """The next request, head and body. Raises: IncompleteReadError: the client has closed."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        self.requests.append(head + await self.reader.readexactly(length))
        return self.requests[-1]

    async def answer(self, content: bytes) -> None:
        self.writer.write(content)
        await self.writer.drain()


Script = Callable[[Peer, int], Awaitable[None]]


def leaves_after(sent: bytes) -> Script:
    """Ends the connection when it has answered this to the first request."""

    async def script(peer: Peer, _: int) -> None:
        await peer.request()
        await peer.answer(sent)

    return script


def stays_after(sent: bytes) -> Script:
    """Is silent when it has answered this to the first request, until the client closes."""

    async def script(peer: Peer, _: int) -> None:
        await peer.request()
        await peer.answer(sent)
        await peer.request()

    return script


class Server:
    """Runs `script(peer, number of the connection)` for each connection."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.closed_by_client = 0
        self.url = ""


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[Server]:
    server = Server()
    tasks: set[asyncio.Task[None]] = set()

    async def handle(peer: Peer, number: int) -> None:
        try:
            await script(peer, number)
        except (asyncio.IncompleteReadError, ConnectionError):
            server.closed_by_client += 1
        finally:
            peer.writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.peers.append(Peer(reader, writer))
        tasks.add(asyncio.create_task(handle(server.peers[-1], len(server.peers))))

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def client_of(
    url: str, timeouts: HttpTimeouts | None = None, api_key: str | None = None
) -> AsyncIterator[HttpClient]:
    client = HttpClient(url, ReplicaId("r0"), timeouts=timeouts, api_key=api_key)
    try:
        yield client
    finally:
        await client.close()


async def body_of(client: HttpClient) -> bytes:
    async with client.send("/v1/completions", b"{}", {}) as response:
        return b"".join([chunk async for chunk in response.chunks()])


async def always_ok(peer: Peer, _: int) -> None:
    while True:
        await peer.request()
        await peer.answer(ANSWER)


async def test_the_body_and_headers_reach_the_engine_as_they_are() -> None:
    async with serving(always_ok) as server, client_of(server.url) as client:
        async with client.send("/v1/completions", b'{"a": 1}', {"X-Request-Id": "7"}) as response:
            assert response.status == 200
            assert response.headers["content-type"] == "application/json"
            assert b"".join([chunk async for chunk in response.chunks()]) == b"ok"
        [request] = server.peers[0].requests
        head, _, body = request.partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/completions HTTP/1.1")
        assert b"X-Request-Id: 7" in head
        assert b"Content-Type: application/json" in head
        assert b"Accept-Encoding" not in head, "a compressed answer could not be passed on as it is"
        assert body == b'{"a": 1}'


async def test_a_connection_is_used_again_after_a_body_that_was_read_to_its_end() -> None:
    async with serving(always_ok) as server, client_of(server.url) as client:
        for _ in range(3):
            assert await body_of(client) == b"ok"
        assert len(server.peers) == 1


async def test_leaving_before_the_end_closes_the_connection() -> None:
    async with serving(stays_after(BEGUN)) as server, client_of(server.url) as client:
        async with client.send("/v1/completions", b"{}", {}) as response:
            assert await anext(response.chunks()) == b"hi"
        await eventually(lambda: server.closed_by_client == 1, "the engine sees that we are gone")


async def test_being_cancelled_while_waiting_for_an_answer_closes_the_connection() -> None:
    async with serving(stays_after(b"")) as server, client_of(server.url) as client:
        task = asyncio.create_task(body_of(client))
        await eventually(lambda: bool(server.peers and server.peers[0].requests), "the request arrived")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: server.closed_by_client == 1, "the engine sees that we are gone")


async def test_no_server_is_a_refusal() -> None:
    async with serving(always_ok) as server:
        url = server.url
    async with client_of(url) as client:
        with pytest.raises(EngineRefused, match=r"replica r0 at http://127\.0\.0\.1:\d+ cannot be reached") as caught:
            await body_of(client)
    assert caught.value.replica_id == "r0"


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine, what breaks at once breaks at once."""
    monkeypatch.setattr(pool, "STALE_WINDOW_S", FOREVER)  # ships 1 s


async def test_a_new_connection_broken_before_any_answer_is_gone_and_the_request_is_not_sent_again(
    unhurried: None,
) -> None:
    async with serving(leaves_after(b"")) as server, client_of(server.url) as client:
        with pytest.raises(EngineGone):
            await body_of(client)
        assert len(server.peers) == 1


async def test_a_pooled_connection_that_the_server_closed_meanwhile_costs_nothing(unhurried: None) -> None:
    async def closes_when_used_again(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.answer(ANSWER)
        if number == 1:
            await peer.request()
        else:
            await always_ok(peer, number)

    async with serving(closes_when_used_again) as server, client_of(server.url) as client:
        assert await body_of(client) == b"ok"
        assert await body_of(client) == b"ok"
        assert len(server.peers) == 2


async def test_a_server_that_accepts_breaks_and_then_refuses_is_gone_not_refusing(unhurried: None) -> None:
    """Refused means that it has done nothing; this one may have died of the request."""
    listener: asyncio.Server

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(ANSWER)
        await reader.readuntil(b"\r\n\r\n{}")
        listener.close()
        writer.close()

    listener = await asyncio.start_server(die, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with client_of(f"http://127.0.0.1:{port}") as client:
        assert await body_of(client) == b"ok"
        with pytest.raises(EngineGone, match="accepts no new one"):
            await body_of(client)


async def test_a_connection_broken_in_the_middle_of_the_body_is_gone() -> None:
    async with serving(leaves_after(BEGUN)) as server, client_of(server.url) as client:
        async with client.send("/v1/completions", b"{}", {}) as response:
            chunks = response.chunks()
            assert await anext(chunks) == b"hi"
            with pytest.raises(EngineGone, match="in the middle of its answer"):
                await anext(chunks)
        assert len(server.peers) == 1, "never sent again once an answer has begun"


@pytest.mark.parametrize("sent", [b"", CHUNKED], ids=["nothing", "only the head"])
async def test_an_engine_that_sends_no_first_byte_times_out(sent: bytes) -> None:
    async with serving(stays_after(sent)) as server, client_of(server.url, SHORT) as client:
        with pytest.raises(EngineTimeout):
            await body_of(client)
        assert len(server.peers) <= 1, "not sent again"


async def slowly(times: int, pause_s: float) -> AsyncIterator[bytes]:
    """A body whose pieces come one after the other, as from a client far away."""
    now = asyncio.get_running_loop().time
    for _ in range(times):
        since = now()
        await eventually(lambda since=since: now() > since + pause_s)  # type: ignore[misc]
        yield b"piece"


async def test_the_time_that_a_body_takes_is_not_the_engines() -> None:
    async def takes_all(peer: Peer, _: int) -> None:
        await peer.reader.readuntil(b"0\r\n\r\n")
        await peer.answer(ANSWER)

    timeouts = HttpTimeouts(first_byte_s=1.0)
    async with (
        serving(takes_all) as server,
        client_of(server.url, timeouts) as client,
        client.forward("POST", "/", {}, slowly(2, 0.75)) as answer,
    ):
        assert answer.status == 200


async def test_nothing_is_taken_of_a_body_for_an_engine_that_refuses_connections() -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        async with client_of(f"http://127.0.0.1:{taken.getsockname()[1]}") as client:
            body = slowly(1, 0.0)
            with pytest.raises(EngineRefused):
                async with client.forward("POST", "/", {}, body):
                    pass
            assert await anext(body) == b"piece"


async def test_a_body_that_can_be_read_once_goes_over_a_new_connection() -> None:
    async def ok(peer: Peer, _: int) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.answer(ANSWER)

    async with serving(ok) as server, client_of(server.url) as client:
        assert await body_of(client) == b"ok"
        async with client.forward("POST", "/", {"content-length": "5"}, slowly(1, 0.0)) as answer:
            assert answer.status == 200
        assert len(server.peers) == 2, "the idle one may be closed by now"


async def test_an_engine_that_answers_before_the_end_of_a_body_is_heard_at_once() -> None:
    async def refuses(peer: Peer, _: int) -> None:
        await peer.reader.readuntil(b"piece")
        await peer.answer(ANSWER)
        await peer.reader.read()

    async with serving(refuses) as server, client_of(server.url) as client:
        for count in (1, 2):
            async with client.forward("POST", "/", {}, endless()) as answer:
                assert [chunk async for chunk in answer.chunks()] == [b"ok"]
            assert len(server.peers) == count, "the rest of the body is missing there"


async def test_a_body_that_breaks_off_ends_the_request() -> None:
    async def breaks() -> AsyncIterator[bytes]:
        yield b"piece"
        raise ValueError("the client has gone")

    async def waits(peer: Peer, _: int) -> None:
        await peer.reader.read()

    async with serving(waits) as server, client_of(server.url) as client:
        with pytest.raises(EngineGone, match="the whole body"):
            async with client.forward("POST", "/", {}, breaks()):
                pass
        assert len(server.peers) <= 1


async def endless() -> AsyncIterator[bytes]:
    yield b"piece"
    await asyncio.Event().wait()


async def test_an_engine_that_does_not_answer_a_body_that_is_complete_times_out() -> None:
    async def never(peer: Peer, _: int) -> None:
        await asyncio.Event().wait()

    async with serving(never) as server, client_of(server.url, HttpTimeouts(first_byte_s=0.1)) as client:
        with pytest.raises(EngineTimeout):
            async with client.forward("POST", "/", {}, slowly(1, 0.0)):
                pass


async def test_an_engine_that_falls_silent_times_out() -> None:
    timeouts = HttpTimeouts(idle_s=0.2)
    async with (
        serving(stays_after(BEGUN)) as server,
        client_of(server.url, timeouts) as client,
        client.send("/v1/completions", b"{}", {}) as response,
    ):
        chunks = response.chunks()
        assert await anext(chunks) == b"hi"
        with pytest.raises(EngineTimeout, match="sent nothing for too long"):
            await anext(chunks)


@pytest.mark.parametrize("rubbish", [b"220 mail ready\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\x00" * 100 + b"\r\n\r\n"])
async def test_a_server_that_does_not_speak_http_breaks_the_protocol(rubbish: bytes) -> None:
    async with serving(leaves_after(rubbish)) as server, client_of(server.url) as client:
        with pytest.raises(EngineProtocolError):
            await body_of(client)


async def test_an_answer_of_our_own_that_never_ends_is_cut_off() -> None:
    async def endless(peer: Peer, _: int) -> None:
        await peer.request()
        await peer.answer(CHUNKED)
        while True:
            await peer.answer(b"100000\r\n" + bytes(0x100000) + b"\r\n")

    async with serving(endless) as server, client_of(server.url) as client:
        with pytest.raises(EngineProtocolError, match="more than 16 MiB"):
            await client.ask("/metrics")


async def test_a_question_of_our_own_times_out() -> None:
    async with serving(stays_after(b"")) as server, client_of(server.url, SHORT) as client:
        with pytest.raises(EngineTimeout):
            await client.ask("/health")


async def test_a_question_of_our_own_opens_a_connection_though_requests_keep_one() -> None:
    """A check must find out whether the server accepts connections. What is asked right afterwards needs no other."""
    async with serving(always_ok) as server, client_of(server.url) as client:
        await body_of(client)
        for _ in range(2):
            assert (await client.ask("/health")).content == b"ok"
        assert [len(peer.requests) for peer in server.peers] == [1, 2]
        assert b"content-length" not in server.peers[1].requests[0].lower()


async def test_a_question_of_our_own_may_have_a_query() -> None:
    async with serving(always_ok) as server, client_of(server.url) as client:
        await client.ask("/about?of=a%20b&x= \r\n")
        assert server.peers[0].requests[0].startswith(b"GET /about?of=a%20b&x=%20%0D%0A HTTP/1.1\r\n")


async def test_the_api_key_is_sent_unless_the_request_brings_its_own() -> None:
    async with serving(always_ok) as server, client_of(server.url, api_key="secret") as client:
        await body_of(client)
        async with client.send("/v1/completions", b"{}", {"authorization": "Bearer mine"}) as response:
            assert [chunk async for chunk in response.chunks()] == [b"ok"]
        ours, theirs = server.peers[0].requests
        assert b"Authorization: Bearer secret" in ours
        assert b"secret" not in theirs


async def test_a_body_is_read_once() -> None:
    async with (
        serving(always_ok) as server,
        client_of(server.url) as client,
        client.send("/v1/completions", b"{}", {}) as response,
    ):
        assert [chunk async for chunk in response.chunks()] == [b"ok"]
        with pytest.raises(RuntimeError, match="once"):
            await anext(response.chunks())


async def test_a_client_that_is_closed_while_it_connects_sends_nothing() -> None:
    async with serving(always_ok) as server, client_of(server.url) as client:
        asked = asyncio.create_task(client.ask("/ping"))
        await asyncio.sleep(0)  # it asks
        await asyncio.sleep(0)  # it connects
        await client.close()
        with pytest.raises(EngineRefused):
            await asked
        assert not any(peer.requests for peer in server.peers)
        assert not client._questions._kept


async def test_a_closed_client_may_be_closed_again_and_refuses_so_that_requests_go_elsewhere() -> None:
    client = HttpClient("http://127.0.0.1:1", ReplicaId("r0"))
    await client.close()
    await client.close()
    with pytest.raises(EngineRefused, match="no longer watched"):
        await client.ask("/health")


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host", "http://", "//host"])
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL of a server"):
        HttpClient(url, ReplicaId("r0"))


def test_the_v1_suffix_is_not_needed_and_does_no_harm() -> None:
    assert HttpClient("http://h:1/v1/", ReplicaId("r0")).url == "http://h:1"
