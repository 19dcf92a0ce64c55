"""New connections do not wait behind the work of those that are there, such as a probe at a busy gateway, and no
request keeps the server from the others."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from preble.web.server import server as web_server
from preble.web.server.answering import Answering, RequestHead
from preble.web.server.awaited import AwaitedRequest
from preble.web.server.connection import ClientConnection
from preble.web.server.listening import listen
from preble.web.server.server import Server
from support.waiting import eventually
from web.test_connection import by_task

WAITING = 64


async def ok(request: AwaitedRequest) -> None:
    request.reply(200, [], b"ok")


def nobody(connection: ClientConnection, head: RequestHead) -> Answering:
    raise AssertionError("nobody asks")


async def turns_until_all_are_accepted() -> int:
    """How many turns of the event loop it takes until everybody who waits at the socket is connected."""
    with ExitStack() as stack:
        listener = listen("127.0.0.1", 0)
        address = listener.getsockname()
        server = Server(nobody, grace_s=1)
        serving = asyncio.create_task(server.serve([listener]))
        await server.listening.wait()
        for _ in range(WAITING):
            stack.enter_context(socket.create_connection(address))
        turns = 0
        while len(server.connections) < WAITING:
            await asyncio.sleep(0)
            turns += 1
    server.stop()
    await serving
    return turns


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop, whose turns accept one connection a file, is not there")
def test_one_turn_of_the_event_loop_accepts_many_connections() -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(turns_until_all_are_accepted()) <= WAITING / 4


async def test_a_server_accepts_in_place_of_another_until_that_is_back() -> None:
    """Who connects meanwhile is served; who comes afterwards waits for the other one."""
    with listen("127.0.0.1", 0) as own, listen("127.0.0.1", 0) as of_another, ExitStack() as clients:
        server = Server(nobody, grace_s=1)
        serving = asyncio.create_task(server.serve([own]))
        await server.listening.wait()
        clients.enter_context(socket.create_connection(of_another.getsockname()))
        further = await server.accept_at(of_another)
        await eventually(lambda: len(server.connections) == 1)
        further.close()
        clients.enter_context(socket.create_connection(of_another.getsockname()))
        clients.enter_context(socket.create_connection(own.getsockname()))
        await eventually(lambda: len(server.connections) == 2)
        late, _ = of_another.accept()
        late.close()
        server.stop()
        await serving


@pytest.mark.plain
async def test_time_limits_hold_after_one_request_fails_at_its_own() -> None:
    looks: list[float] = []

    class Failing(Answering):
        def on_time(self, now: float) -> None:
            looks.append(now)
            raise ValueError("a defect")

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    with listen("127.0.0.1", 0) as listener:
        server = Server(Failing, grace_s=1)
        serving = asyncio.create_task(server.serve([listener]))
        await server.listening.wait()
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n")
            await eventually(lambda: len(looks) > 1)
        server.stop()
        await serving


async def test_a_server_without_connections_looks_at_nothing() -> None:
    with listen("127.0.0.1", 0) as listener:
        server = Server(nobody, grace_s=1)
        serving = asyncio.create_task(server.serve([listener]))
        await server.listening.wait()
        for _ in range(2):
            assert server._sweeping is None
            with socket.create_connection(listener.getsockname()):
                await eventually(lambda: server._sweeping is not None)
            await eventually(lambda: server._sweeping is None)
        server.stop()
        await serving


async def test_answers_have_the_date_also_after_a_long_time_without_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listen("127.0.0.1", 0) as listener:
        server = Server(by_task(ok), grace_s=1)
        serving = asyncio.create_task(server.serve([listener]))
        await server.listening.wait()
        first, next_day = (1.0, b"Thu, 01 Jan 1970 00:00:01 GMT"), (86_400.9, b"Fri, 02 Jan 1970 00:00:00 GMT")
        for now, date in (first, next_day, first):  # at last the clock is set back
            monkeypatch.setattr(web_server, "time", SimpleNamespace(time=lambda now=now: now))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert b"date: " + date in await reader.read()
            writer.close()
            await eventually(lambda: server._sweeping is None)
        server.stop()
        await serving
