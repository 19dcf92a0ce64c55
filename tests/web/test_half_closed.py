"""Clients that have sent their request and close their sending half, or go away altogether, on either event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from preble.web.server.awaited import AwaitedRequest, ClientGone
from support.waiting import eventually
from web.test_connection import HEALTHY, Application, Peer, connected, serving

Loop = Callable[[], asyncio.AbstractEventLoop]
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[None]], None]:
    """Run a coroutine on one of the event loops that servers run on."""

    def run_it(work: Any) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(work)

    return run_it


class Watching(Application):
    """Answers once its gate opens; counts the clients that it sees leave before."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.clear()
        self.left = 0

    async def __call__(self, request: AwaitedRequest) -> None:
        self.started += 1
        try:
            with request.unless_gone():
                await self.gate.wait()
        except ClientGone:
            self.left += 1
        request.reply(200, [], b"ok")


async def half_closed(peer: Peer, app: Application, requests: bytes = HEALTHY) -> None:
    await peer.send(requests)
    await eventually(lambda: app.started > 0)
    peer.writer.write_eof()


def test_a_half_closed_client_gets_its_answer(run: Callable[[Any], None]) -> None:
    async def scenario() -> None:
        app = Watching()
        async with serving(app) as port, connected(port) as peer:
            await half_closed(peer, app)
            assert await peer.reader.readuntil(PROBE) == PROBE
            app.gate.set()
            said = await peer.end()
        assert app.left == 0
        assert said.replace(PROBE, b"").startswith(b"HTTP/1.1 200 ")
        assert said.endswith(b"ok")

    run(scenario())


def test_all_requests_of_a_half_closed_client_are_answered(run: Callable[[Any], None]) -> None:
    async def scenario() -> None:
        app = Watching()
        async with serving(app) as port, connected(port) as peer:
            await half_closed(peer, app, 3 * HEALTHY)
            app.gate.set()
            said = await peer.end()
        assert said.count(b"HTTP/1.1 200 ") == 3

    run(scenario())


def test_a_client_that_closes_is_noticed_before_it_is_answered(run: Callable[[Any], None]) -> None:
    async def scenario() -> None:
        app = Watching()
        async with serving(app) as port:
            async with connected(port) as peer:
                await peer.send(HEALTHY)
                await eventually(lambda: app.started == 1)
            await eventually(lambda: app.left == 1)

    run(scenario())


def test_a_half_closed_client_that_then_closes_is_noticed(run: Callable[[Any], None]) -> None:
    async def scenario() -> None:
        app = Watching()
        async with serving(app) as port:
            async with connected(port) as peer:
                await half_closed(peer, app)
                await peer.reader.readuntil(PROBE)
            await eventually(lambda: app.left == 1)

    run(scenario())


def test_an_idle_client_that_half_closes_is_closed(run: Callable[[Any], None]) -> None:
    async def scenario() -> None:
        app = Application()
        async with serving(app) as port, connected(port) as peer:
            await peer.send(HEALTHY)
            await peer.answer()
            peer.writer.write_eof()
            assert await peer.end() == b""

    run(scenario())


def test_a_client_that_closes_in_the_middle_of_its_answer_is_noticed(run: Callable[[Any], None]) -> None:
    left = asyncio.Event()

    async def app(request: AwaitedRequest) -> None:
        request.begin(200, [])
        request.write(b"one")
        with contextlib.suppress(ClientGone), request.unless_gone():
            await asyncio.get_running_loop().create_future()
        left.set()

    async def scenario() -> None:
        async with serving(app) as port:
            async with connected(port) as peer:
                await peer.send(HEALTHY)
                await peer.reader.readuntil(b"one")
            await eventually(left.is_set)

    run(scenario())
