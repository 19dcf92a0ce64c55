"""Requests that a coroutine answers: what it leaves undone, and clients that ask first or send more than is taken."""

from __future__ import annotations

import asyncio
import json

import pytest
from structlog.testing import capture_logs

from preble.web.server.awaited import AwaitedRequest, ClientGone
from support.waiting import eventually
from web.test_connection import HEALTHY, Application, connected, serving

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
ASKING = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n"


async def test_head_gets_the_head_of_the_answer_and_the_connection_goes_on() -> None:
    async def app(request: AwaitedRequest) -> None:
        request.reply(200, [], b"hello")

    async with serving(app) as port, connected(port) as peer:
        await peer.send(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n" + HEALTHY)
        head = await peer.reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 5" in head
        assert await peer.answer() == (200, b"hello")


async def test_head_of_a_stream_gets_its_head_at_once_and_nothing_else() -> None:
    gate = asyncio.Event()

    async def app(request: AwaitedRequest) -> None:
        request.begin(200, [])
        await gate.wait()
        request.write(b"hello")
        request.end()

    async with serving(app) as port, connected(port) as peer:
        await peer.send(b"HEAD / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await peer.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        gate.set()
        assert await peer.end() == b""


async def test_only_a_client_whose_body_is_taken_is_asked_to_go_on() -> None:
    async def refusing(request: AwaitedRequest) -> None:
        request.reply(401, [(b"connection", b"close")], b"")

    async with serving(Application()) as port, connected(port) as peer:
        await peer.send(ASKING)
        assert await peer.reader.readuntil(CONTINUE) == CONTINUE
        await peer.send(b"hello")
        assert await peer.answer() == (200, b"5")
    async with serving(refusing) as port, connected(port) as peer:
        await peer.send(ASKING)
        assert (await peer.end()).startswith(b"HTTP/1.1 401 ")


async def test_of_a_body_that_is_not_taken_little_is_read() -> None:
    app = Application()
    taking = asyncio.Event()
    requests: list[AwaitedRequest] = []

    async def slow(request: AwaitedRequest) -> None:
        requests.append(request)
        await taking.wait()
        await app(request)

    size = 20_000_000
    async with serving(slow) as port, connected(port) as peer:
        sending = asyncio.create_task(
            peer.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + bytes(size))
        )
        await eventually(lambda: bool(requests) and requests[0]._connection._is_read_paused)
        assert requests[0]._num_untaken < 1_000_000
        taking.set()
        assert await peer.answer() == (200, b"%d" % size)
        await sending


async def test_who_leaves_while_his_body_is_not_taken_is_noticed() -> None:
    left = asyncio.Event()

    async def app(request: AwaitedRequest) -> None:
        try:
            with request.unless_gone():
                await asyncio.get_running_loop().create_future()
        except ClientGone:
            left.set()

    async with serving(app) as port, connected(port) as peer:
        await peer.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n\r\n" + bytes(200_000))
        peer.writer.transport.abort()
        await eventually(left.is_set)


@pytest.mark.parametrize("begins", [False, True])
async def test_a_bug_is_logged_and_ends_the_connection(begins: bool) -> None:
    async def app(request: AwaitedRequest) -> None:
        if begins:
            request.begin(200, [])
            request.write(b"one")
        raise ValueError("a defect")

    with capture_logs() as logs:
        async with serving(app) as port, connected(port) as peer:
            await peer.send(HEALTHY)
            said = await peer.end()
    assert not said.endswith(b"0\r\n\r\n")
    if not begins:
        head, _, body = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 500 ")
        assert json.loads(body)["error"]["code"] == "internal_error"
    assert [line["event"] for line in logs] == ["request_failed"]


async def test_an_answer_that_is_not_completed_ends_with_the_connection() -> None:
    async def app(request: AwaitedRequest) -> None:
        request.begin(200, [])
        request.write(b"one")

    async with serving(app) as port, connected(port) as peer:
        await peer.send(HEALTHY)
        assert not (await peer.end()).endswith(b"0\r\n\r\n")


async def test_a_client_is_asked_to_go_on_once_and_not_by_http_1_0() -> None:
    pieces: list[bytes] = []

    async def app(request: AwaitedRequest) -> None:
        while piece := await request.piece():
            pieces.append(piece)
        request.reply(200, [(b"connection", b"close")], b"")

    async with serving(app) as port, connected(port) as peer:
        await peer.send(ASKING + b"he")
        await eventually(lambda: bool(pieces))
        await peer.send(b"llo")
        assert CONTINUE not in await peer.end()
    async with serving(app) as port, connected(port) as peer:
        await peer.send(ASKING)
        assert await peer.reader.readuntil(CONTINUE) == CONTINUE
        pieces.clear()
        await peer.send(b"he")
        await eventually(lambda: bool(pieces))
        await peer.send(b"llo")
        assert CONTINUE not in await peer.end()
    async with serving(app) as port, connected(port) as peer:
        await peer.send(ASKING.replace(b"HTTP/1.1", b"HTTP/1.0"))
        await peer.send(b"hello")
        assert CONTINUE not in await peer.end()


async def test_who_leaves_after_a_large_body_is_noticed_before_the_answer() -> None:
    taken, left = asyncio.Event(), asyncio.Event()

    async def app(request: AwaitedRequest) -> None:
        while await request.piece():
            pass
        taken.set()
        try:
            with request.unless_gone():
                await asyncio.get_running_loop().create_future()
        except ClientGone:
            left.set()

    async with serving(app) as port, connected(port) as peer:
        await peer.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n" + bytes(200_000))
        await eventually(taken.is_set)
        peer.writer.transport.abort()
        await eventually(left.is_set)


async def test_heads_that_a_client_does_not_read_wait_like_other_answers() -> None:
    count = 1000
    requests: list[AwaitedRequest] = []
    running: set[AwaitedRequest] = set()

    async def app(request: AwaitedRequest) -> None:
        requests.append(request)
        running.add(request)
        request.reply(200, [(b"x-long", b"x" * 20_000)], b"body")
        await request.drained()
        running.remove(request)

    async with serving(app, send_buffer_bytes=8192) as port, connected(port) as peer:
        await peer.send(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n" * count)
        await eventually(lambda: bool(requests) and requests[0]._connection.is_write_paused)
        for _ in range(count):
            assert (await peer.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await eventually(lambda: len(requests) == count and not running)


@pytest.mark.parametrize("status", [204, 304])
async def test_a_streamed_answer_that_has_no_body_by_its_status_has_no_last_chunk(status: int) -> None:
    async def app(request: AwaitedRequest) -> None:
        request.begin(status, [])
        request.end()

    async with serving(app) as port, connected(port) as peer:
        await peer.send(HEALTHY)
        said = await peer.end()
    assert said.endswith(b"\r\n\r\n")
    assert b"transfer-encoding" not in said
    assert b"0\r\n\r\n" not in said


async def test_an_idle_connection_keeps_nothing_of_a_body_that_was_not_taken() -> None:
    requests: list[AwaitedRequest] = []

    async def app(request: AwaitedRequest) -> None:
        requests.append(request)
        await request._changed.wait()
        request.reply(404, [], b"")

    async with serving(app) as port, connected(port) as peer:
        await peer.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n" + bytes(200_000))
        assert await peer.answer() == (404, b"")
        assert not requests[0]._pieces


async def test_of_requests_that_come_without_an_end_no_more_are_read_than_one_piece_has() -> None:
    most = served = 0

    async def app(request: AwaitedRequest) -> None:
        nonlocal most, served
        served += 1
        most = max(most, len(request._connection._waiting))
        request.reply(200, [], b"")

    async with serving(app) as port, connected(port) as peer:
        sending = asyncio.create_task(peer.send(HEALTHY * 60_000))
        await eventually(lambda: served > 30)
        peer.writer.transport.abort()
        await asyncio.wait([sending])
    assert most * len(HEALTHY) <= 2 * 256 * 1024
