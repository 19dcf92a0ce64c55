"""A server that ends answers who has just connected or asked, and waits for nobody else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from preble.web.server import connection
from preble.web.server.awaited import AwaitedRequest
from preble.web.server.listening import listen
from preble.web.server.server import Server
from support.waiting import PATIENCE_S, eventually
from web.test_connection import by_task

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def app(request: AwaitedRequest) -> None:
    request.reply(200, [], b"ok")


@asynccontextmanager
async def one_connection() -> AsyncIterator[tuple[Server, socket.socket]]:
    """A server, and a client's end of its only connection, which is accepted."""
    with listen("127.0.0.1", 0) as listener:
        server = Server(by_task(app), grace_s=60)
        serving = asyncio.create_task(server.serve([listener]))
        await server.listening.wait()
        with socket.create_connection(listener.getsockname()) as client:
            client.settimeout(PATIENCE_S)
            await eventually(lambda: len(server.connections) == 1)
            yield server, client
        await serving


async def begin_to_end(server: Server) -> None:
    """Return when the server accepts nobody any more and has told its connections to end."""
    server.stop()
    [one] = server.connections
    await eventually(lambda: one._is_ending)


async def received(client: socket.socket, end: bytes | None = None) -> bytes:
    """What comes until the server closes, or until it ends with `end`: head and body may come apart."""
    answer = b""
    while piece := await asyncio.to_thread(client.recv, 65536):
        answer += piece
        if end and answer.endswith(end):
            break
    return answer


async def test_who_has_just_connected_gets_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LAST_HEAD_S", PATIENCE_S)  # ships 2 s
    async with one_connection() as (server, client):
        await begin_to_end(server)
        client.sendall(REQUEST)
        answer = await received(client)
        assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer and answer.endswith(b"ok")


async def test_a_request_that_has_arrived_and_is_not_read_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LAST_HEAD_S", PATIENCE_S)  # ships 2 s
    async with one_connection() as (server, client):
        client.sendall(REQUEST)
        assert (await received(client, end=b"ok")).endswith(b"ok")
        [one] = server.connections
        client.sendall(REQUEST)
        one.shutdown()  # before the event loop can have read it
        answer = await received(client)
        assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer
        server.stop()


async def test_who_never_asks_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LAST_HEAD_S", 0.01)  # ships 2 s
    async with one_connection() as (server, client):
        await begin_to_end(server)
        assert await received(client) == b""
