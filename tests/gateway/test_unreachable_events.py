"""A replica that announces KV events which do not arrive: the gateway estimates its cache, says so, and recovers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from preble.config import ParityConfig, ReplicaConfig
from preble.emulator import EmulatorConfig, EmulatorServer
from preble.engines import connect
from preble.gateway.server import Gateway
from support.gateways import gateway_before
from support.relay import TcpRelay
from support.waiting import eventually

PROMPT = list(range(100, 260))
WHOLE_BLOCKS = 160 - 16
"""Of the prompt, those that a repetition can find: its last token is always computed."""


class Behind:
    """A gateway before one emulated replica whose KV events come through `relay`."""

    def __init__(self, gateway: Gateway, http: aiohttp.ClientSession, relay: TcpRelay) -> None:
        self.gateway = gateway
        self.relay = relay
        self._http = http

    async def matched(self, prompt: list[int]) -> int:
        """Tokens that the gateway expects to be cached of a prompt that it now places."""
        async with self._http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
            return int(answer.headers["x-preble-matched-tokens"])

    async def page(self) -> dict[str, Any]:
        """The replica on `/debug/replicas`."""
        async with self._http.get("/debug/replicas") as answer:
            [replica] = json.loads(await answer.text())["replicas"]
            return dict(replica)

    async def arrive(self) -> bool:
        """Whether the metrics say that its events arrive."""
        async with self._http.get("/metrics") as answer:
            [line] = [li for li in (await answer.text()).splitlines() if li.startswith("preble_kv_events_arrive{")]
        return line.endswith(" 1.0")

    async def stored(self) -> None:
        """Return when an event of stored blocks has come."""
        replica = next(iter(self.gateway.serving.replicas))
        events = self.gateway.serving.telemetry.numbers.cell("preble_kv_events_total", replica, "BlocksStored")
        await eventually(lambda: events[0] > 0, "a stored block is reported")

    async def lost(self, lost: bool = True) -> None:
        """Return when the page says that events are lost, or are not."""

        async def says_so() -> bool:
            return (await self.page())["has_lost_events"] is lost

        await eventually(says_so, f"has_lost_events is {lost}")


@asynccontextmanager
async def behind(*, cut: bool, parity: bool = False) -> AsyncIterator[Behind]:
    async with EmulatorServer(EmulatorConfig(profile="tiny-cpu", speed=50.0, events_port=0)) as emulated:
        server = connect(emulated.url)
        own = (await server.probe()).engine.kv_event_endpoints  # type: ignore[attr-defined]
        await server.close()
        async with TcpRelay(own.endpoint) as relay:
            if cut:
                await relay.cut()
            replica = ReplicaConfig(emulated.url, kv_events=relay.address, kv_events_replay=own.replay)
            settings = {"profile": "tiny-cpu", "parity": ParityConfig(enabled=parity)}
            async with gateway_before([replica], **settings) as gateway, aiohttp.ClientSession(gateway.url) as http:
                yield Behind(gateway, http, relay)


async def test_what_a_replica_caches_is_estimated_while_its_events_cannot_be_reached() -> None:
    async with behind(cut=True) as gateway:
        await gateway.lost()
        assert not await gateway.arrive()
        assert await gateway.matched(PROMPT) == 0
        assert await gateway.matched(PROMPT) == WHOLE_BLOCKS


async def test_events_that_can_be_reached_again_count_again() -> None:
    async with behind(cut=True) as gateway:
        await gateway.lost()
        await gateway.matched(PROMPT)
        gateway.relay.mend()
        await gateway.lost(False)
        assert await gateway.arrive()
        await gateway.stored()
        assert await gateway.matched(PROMPT) == WHOLE_BLOCKS


async def test_events_that_break_off_leave_what_is_known_as_an_estimate() -> None:
    async with behind(cut=False) as gateway:
        await gateway.matched(PROMPT)
        await gateway.stored()
        await gateway.relay.cut()
        await gateway.lost()
        assert await gateway.matched(PROMPT) == WHOLE_BLOCKS


async def test_parity_does_not_distrust_a_replica_whose_events_cannot_be_reached() -> None:
    async with behind(cut=True, parity=True) as gateway:
        await gateway.lost()

        async def is_checked() -> bool:
            return (await gateway.page())["parity"] is not None

        await eventually(is_checked, "parity is checked")
        page = await gateway.page()
        assert page["trusted"] and page["parity"] == "unchecked"
