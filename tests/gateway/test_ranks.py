"""Data-parallel ranks behind one address: each is a replica of its own to the scheduler, and requests name the rank."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from preble.config import HealthConfig, ParityConfig, ReplicaConfig
from preble.emulator import EmulatorConfig, EmulatorServer
from preble.gateway.server import Gateway
from preble.serving.replicas.rotation import Rotation
from support.gateways import gateway_before
from support.waiting import eventually

NUM_RANKS = 2
RANK = "x-data-parallel-rank"


class Ranks:
    """A gateway before one emulated server of two ranks."""

    def __init__(self, emulated: EmulatorServer, gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.emulated = emulated
        self.gateway = gateway
        self.http = http

    async def complete(self, prompt: list[int], **headers: str) -> tuple[int, str, int]:
        """Status, the replica's name and the tokens that it says were cached."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        body = {"prompt": prompt, "max_tokens": 1}
        async with self.http.post("/v1/completions", json=body, headers=named) as answer:
            content = await answer.json()
            usage = content.get("usage") or {"prompt_tokens_details": {"cached_tokens": 0}}
            replica = answer.headers.get("x-preble-replica", "")
            return answer.status, replica, usage["prompt_tokens_details"]["cached_tokens"]

    async def pages(self) -> list[dict[str, Any]]:
        async with self.http.get("/debug/replicas") as answer:
            return list(json.loads(await answer.text())["replicas"])

    def computed(self) -> list[int]:
        """Prompt tokens that each rank has looked up."""
        return [engine.scheduler.stats.prefix_queries for engine in self.emulated.engines]


@asynccontextmanager
async def ranks(policy: str = "preble", **settings: Any) -> AsyncIterator[Ranks]:
    config = EmulatorConfig(profile="tiny-cpu", speed=50.0, events_port=0, data_parallel_size=NUM_RANKS)
    async with EmulatorServer(config) as emulated:
        settings |= {"profile": "tiny-cpu", "policy": policy}
        async with (
            gateway_before([ReplicaConfig(emulated.url)], joined=NUM_RANKS, **settings) as gateway,
            aiohttp.ClientSession(gateway.url) as http,
        ):
            yield Ranks(emulated, gateway, http)


async def test_each_rank_gets_the_requests_that_are_placed_there() -> None:
    async with ranks("round_robin") as gateway:
        for start in range(0, 4000, 1000):
            assert (await gateway.complete(list(range(start, start + 100))))[0] == 200
        assert gateway.computed() == [200, 200]


async def test_a_prefix_is_found_again_on_its_rank() -> None:
    async with ranks() as gateway:
        prompts = [list(range(start, start + 161)) for start in range(0, 4000, 1000)]
        first = [(await gateway.complete(prompt))[1] for prompt in prompts]
        again = [await gateway.complete(prompt) for prompt in prompts]
        assert [replica for _, replica, _ in again] == first
        assert [cached for _, _, cached in again] == [160] * 4


async def test_the_events_of_each_rank_are_those_of_its_own_cache() -> None:
    async with ranks("round_robin", parity=ParityConfig()) as gateway:

        async def are_verified() -> bool:
            return [page["parity"] for page in await gateway.pages()] == ["verified"] * NUM_RANKS

        await eventually(are_verified, "what each rank reports is what was sent there")
        assert all(page["reports_events"] for page in await gateway.pages())


async def test_each_rank_counts_with_its_own_capacity() -> None:
    async with ranks() as gateway:
        engine = gateway.emulated.engine
        own = engine.num_blocks * engine.block_size
        assert [page["kv_capacity_tokens"] for page in await gateway.pages()] == [own, own]


async def test_a_clients_own_choice_of_a_rank_is_kept() -> None:
    async with ranks("round_robin") as gateway:
        for start in range(0, 4000, 1000):
            status, replica, _ = await gateway.complete(list(range(start, start + 100)), x_data_parallel_rank="1")
            assert (status, replica[-2:]) == (200, "#1")
        assert gateway.computed() == [0, 400]


async def test_a_rank_that_the_engine_does_not_have_is_the_engines_to_refuse() -> None:
    async with ranks("round_robin") as gateway:
        assert (await gateway.complete([1, 2, 3], x_data_parallel_rank="7"))[0] == 400


async def test_all_ranks_of_a_server_that_ends_leave_the_rotation() -> None:
    async with ranks() as gateway:
        urls = {page["replica"] for page in await gateway.pages()}
        assert urls == {f"{gateway.emulated.url}#{rank}" for rank in range(NUM_RANKS)}
        for replica in list(gateway.gateway.serving.replicas.values()):
            replica.suspect.set()
        gateway.emulated._http.stop()
        await eventually(lambda: len(gateway.gateway.serving.replicas) == 0, "none is left")


async def test_ranks_of_which_one_cannot_join_leave_nothing_behind_and_try_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add, left = Rotation.add, []

    def fails_once(rotation: Rotation, engine: Any, *rest: Any) -> Any:
        if engine.replica_id.endswith("#1") and not left:
            left.append(engine.replica_id)
            raise RuntimeError("no room for it")
        return add(rotation, engine, *rest)

    monkeypatch.setattr(Rotation, "add", fails_once)
    async with ranks("round_robin", health=HealthConfig(retry_max_s=0.05)) as gateway:
        assert left
        assert (await gateway.complete([1, 2, 3]))[0] == 200
