"""Copies that the scheduler process has made for requests of its front ends, before these hear where they go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from preble.config import GatewayConfig, ParityConfig, ReplicaConfig
from preble.core.types import ReplicaId
from preble.core.types.life import Ended, Outcome
from preble.emulator import EmulatorConfig, EmulatorServer
from preble.emulator.kv.p2p_tier import KvSource
from preble.prompts.endpoints import COMPLETIONS
from preble.serving import FrontEnd, Placed, Serving
from support.linked import linked_profile
from support.waiting import eventually

BLOCK = 16
WHOLE = 20 * BLOCK
BODY = {"prompt": list(range(1, WHOLE + 6)), "max_tokens": 4}


class FrontOfTwo:
    """A front end of two replicas, one of which has the prompt and is drained. The other copies once `may_send`."""

    def __init__(self, serving: Serving, front_end: FrontEnd, source: EmulatorServer, target: EmulatorServer) -> None:
        self.serving = serving
        self.front_end = front_end
        self.source = source
        self.target = target
        self.may_send = asyncio.Event()
        self.num_asked = 0
        peers = target.engine.peers
        assert peers is not None
        blocks = peers.blocks

        async def when_let(source: KvSource) -> frozenset[int]:
            self.num_asked += 1
            await self.may_send.wait()
            return await blocks(source)

        peers.blocks = when_let  # type: ignore[method-assign]

    def place(self, first: Placed | None = None) -> asyncio.Task[Placed]:
        """Place the request, or place it again after its `first` placement; its end is the caller's."""

        async def placed() -> Placed:
            placing = self.front_end.place(self.request, self.parsed.terms) if first is None else first.place_again()
            return await placing

        return asyncio.create_task(placed())

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        parsed = await self.front_end.parse(COMPLETIONS, {}, msgspec.json.encode(BODY), "r")
        async with self.front_end.admitted(parsed) as self.parsed:
            self.request = await self.front_end.tokenize(self.parsed)
            yield

    def drain(self, server: EmulatorServer, *, drained: bool = True) -> None:
        wanted = self.serving.members.wanted
        (wanted.drain if drained else wanted.undrain)(server.url)
        self.serving.members.reconcile()


@asynccontextmanager
async def front_of_two(folder: Path) -> AsyncIterator[FrontOfTwo]:
    profile = str(linked_profile(folder, s_per_token=0.005, bytes_per_s=1e8, latency_s=0.005))
    emulated = EmulatorConfig(profile=profile, speed=20.0, events_port=0, block_size=BLOCK, kv_tokens=20_000, p2p=True)
    async with AsyncExitStack() as stack:
        source, target = [await stack.enter_async_context(EmulatorServer(emulated)) for _ in range(2)]
        replicas = (ReplicaConfig(source.url), ReplicaConfig(target.url))
        config = GatewayConfig(replicas=replicas, profile=profile, parity=ParityConfig(enabled=False))
        serving = await Serving.start(config)
        stack.push_async_callback(serving.close)
        await serving.listen(folder / "socket")
        front_end = await FrontEnd.connect(config, folder / "socket", name="front-end-1", share=1)
        stack.push_async_callback(front_end.close)
        await eventually(lambda: len(front_end.replicas) == 2, "both have joined")
        async with aiohttp.ClientSession(source.url) as http, http.post("/v1/completions", json=BODY) as answer:
            assert answer.status == 200
        of_source = ReplicaId(source.url)
        await eventually(
            lambda: serving.scheduler.snapshot().replicas[of_source].cached_tokens >= WHOLE, "its events have come"
        )
        two = FrontOfTwo(serving, front_end, source, target)
        two.drain(source)
        async with two.admitted():
            yield two
        await eventually(lambda: serving.num_in_flight == 0, "nothing is left in flight")
        serving.scheduler.check()


async def test_a_front_end_hears_where_its_request_goes_once_the_copy_is_there(tmp_path: Path) -> None:
    async with front_of_two(tmp_path) as two:
        placing = two.place()
        await eventually(lambda: two.num_asked == 1, "the copy has begun")
        assert not placing.done()
        two.may_send.set()
        placed = await placing
        assert (placed.engine.url, placed.placement.matched_tokens) == (two.target.url, WHOLE)
        assert two.target.engine.copied_tokens == WHOLE
        placed.end()


async def test_a_request_that_is_placed_again_waits_for_its_copy_too(tmp_path: Path) -> None:
    async with front_of_two(tmp_path) as two:
        two.drain(two.source, drained=False)
        two.drain(two.target)
        first = await two.place()
        assert first.engine.url == two.source.url
        two.drain(two.target, drained=False)
        await eventually(lambda: not two.serving.replicas.held_back)
        first.report(Ended(Outcome.REFUSED, 503))
        placing = two.place(first)
        await eventually(lambda: two.num_asked == 1, "the copy has begun")
        assert not placing.done()
        two.may_send.set()
        (await placing).end()
        assert two.target.engine.copied_tokens == WHOLE


async def test_who_leaves_during_a_copy_leaves_nothing_behind(tmp_path: Path) -> None:
    async with front_of_two(tmp_path) as two:
        placing = two.place()
        await eventually(lambda: two.num_asked == 1, "the copy has begun")
        placing.cancel()
        await eventually(lambda: two.serving.num_in_flight == 0, "its placement has ended")


async def test_who_leaves_before_the_copy_has_begun_leaves_nothing_behind(tmp_path: Path) -> None:
    """The scheduler process reads both messages at once, so it cancels a task that has not taken its first step."""
    async with front_of_two(tmp_path) as two:
        num_placed = len(list(two.serving.recent.latest(10)))
        placing = two.place()
        await asyncio.sleep(0)  # it has asked for a place, and nobody has read that yet
        placing.cancel()
        await eventually(lambda: len(list(two.serving.recent.latest(10))) > num_placed, "it was placed")
        await eventually(lambda: two.serving.num_in_flight == 0, "its placement has ended")
        assert two.num_asked == 0
