"""Several pickers that all answer, and tell each other over real NATS what they place."""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec

from gateway.fakes import replicas
from picker.conftest import Pick, Picking
from picker.gateway_by_hand import EVENTS, USAGE
from picker.test_server import is_ready
from preble.config import PeersConfig
from support.nats import nats_server
from support.waiting import eventually


def prompt(text: str) -> bytes:
    return msgspec.json.encode({"model": "tiny", "prompt": text, "stream": True})


async def all_count(pickers: list[Picking], num_requests: int) -> None:
    """Wait until every picker counts this many requests in flight, whoever placed them."""
    await eventually(lambda: all(sum(one.in_flight().values()) == num_requests for one in pickers))


async def test_pickers_that_all_answer_place_as_one(pick: Pick) -> None:
    """The replicas report no KV events: a picker finds a promised prompt only because another one told it."""
    async with replicas(4) as fakes, AsyncExitStack() as stack:
        server = stack.enter_context(nats_server())
        peers = [PeersConfig(servers=(server.url,), name=name) for name in "abc"]
        pickers = [await stack.enter_async_context(pick(fakes, peers=one)) for one in peers]
        for one in pickers:
            await eventually(lambda one=one: is_ready(one), "a group that knows itself")  # type: ignore[misc]
        running = []
        for number, asked in enumerate(pickers):
            exchange = asked.exchange()
            sent = await exchange.placed(prompt(f"{number}" * 3000))
            running.append(exchange)
            await all_count(pickers, len(running))
            for other in pickers:
                again = other.exchange()
                assert (await again.placed(prompt(f"{number}" * 3000))).destinations[0] == sent.destinations[0]
                await again.answer([*EVENTS, USAGE])
                await all_count(pickers, len(running))
        await running[0].close()  # its client leaves; the others' answers end
        for exchange in running[1:]:
            await exchange.answer([*EVENTS, USAGE])
        await all_count(pickers, 0)
