"""A replica whose KV events are of larger blocks than its metrics say, as with decode context parallelism."""

from __future__ import annotations

import asyncio

import aiohttp

from preble.config import GatewayConfig, ReplicaConfig
from preble.emulator import EmulatorConfig, EmulatorServer
from preble.gateway.server import serving
from support.waiting import eventually

SAID, TRUE = 16, 64


async def test_the_block_size_of_the_events_counts_and_the_replica_is_trusted() -> None:
    config = EmulatorConfig(
        profile="tiny-cpu", speed=50.0, events_port=0, block_size=TRUE, metrics_block_size=SAID, kv_tokens=64 * TRUE
    )
    async with EmulatorServer(config) as emulated:
        gateway_config = GatewayConfig(replicas=(ReplicaConfig(emulated.url),), port=0, profile="tiny-cpu")
        async with serving(gateway_config) as gateway, aiohttp.ClientSession(gateway.url) as http:

            async def matched(prompt: list[int]) -> tuple[int, int]:
                """Tokens that were expected to be cached, and those that were."""
                async with http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}) as answer:
                    usage = (await answer.json())["usage"]
                    found = usage["prompt_tokens_details"]["cached_tokens"]
                    return int(answer.headers["x-preble-matched-tokens"]), found

            def has_the_true_size() -> bool:
                return [r.info.spec.block_size for r in gateway.serving.replicas.values()] == [TRUE]

            async def turns_without_a_replica() -> int:
                """Turns of the loop, until it has joined again, in which a request would have found no replica."""
                turns = 0
                while not has_the_true_size():
                    turns += not gateway.serving.replicas
                    await asyncio.sleep(0)
                return turns

            await eventually(lambda: len(gateway.serving.replicas) == 1, "it has joined")
            prompt = list(range(3 * TRUE + 20))
            first = asyncio.create_task(matched(prompt))
            async with asyncio.timeout(10):
                assert await turns_without_a_replica() == 0
            await first

            def is_verified() -> bool:
                [replica] = gateway.serving.replicas.values()
                return replica.parity is not None and replica.parity.outcome == "verified" and replica.trusted

            await eventually(is_verified, "it is as predicted")
            assert await matched(prompt) == (3 * TRUE, 3 * TRUE)
