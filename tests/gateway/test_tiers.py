"""KV blocks in emulated replicas' host memory and in a store that they share, from their events to placement."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from preble.emulator import EmulatorConfig, EmulatorServer
from preble.gateway.server import Gateway
from support.tiers import gateway_to, loading_profile
from support.waiting import eventually

BLOCK = 16
GPU_TOKENS = 20 * BLOCK
PROMPT = list(range(10 * BLOCK + 1))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return loading_profile(tmp_path)


class Fleet:
    """A gateway before emulated replicas."""

    def __init__(self, replicas: Sequence[EmulatorServer], gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.replicas = replicas
        self.gateway = gateway
        self.http = http

    def in_step(self) -> bool:
        """Whether every event has arrived."""
        published = {server.url: [p.position for p in server.publishers] for server in self.replicas}
        live = self.gateway.serving.replicas
        return all(
            [stream.position for stream in live[url].engine._streams._streams] == positions  # type: ignore[index]
            for url, positions in published.items()
        )

    async def ask(self, prompt: list[int]) -> tuple[str, int, int]:
        """The replica, tokens that were expected to be cached there, and those that were."""
        await eventually(self.in_step, "every event has arrived")
        async with self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}) as answer:
            body = await answer.json()
            assert answer.status == 200, body
            cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            return answer.headers["x-preble-replica"], int(answer.headers["x-preble-matched-tokens"]), cached

    async def overwrite(self) -> None:
        """Fill every replica's own memory with something else."""
        for server in self.replicas:
            async with aiohttp.ClientSession(server.url) as http:
                for start in range(10_000, 40_000, 10_000):
                    body = {"prompt": list(range(start, start + 15 * BLOCK)), "max_tokens": 1}
                    async with http.post("/v1/completions", json=body) as answer:
                        assert answer.status == 200


@asynccontextmanager
async def fleet(profile: Path, number: int, **settings: object) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        config = EmulatorConfig(
            profile=str(profile),
            speed=20.0,
            events_port=0,
            block_size=BLOCK,
            kv_tokens=GPU_TOKENS,
            **settings,  # type: ignore[arg-type]
        )
        replicas = [await stack.enter_async_context(EmulatorServer(config)) for _ in range(number)]
        store = "shared" if "store" in settings else ""
        urls = [server.url for server in replicas]
        gateway = await stack.enter_async_context(gateway_to(urls, profile, store))
        http = await stack.enter_async_context(aiohttp.ClientSession(gateway.url))
        yield Fleet(replicas, gateway, http)


async def test_what_only_host_memory_has_is_expected_and_found(profile: Path) -> None:
    async with fleet(profile, 2, host_tokens=100 * BLOCK) as running:
        first, *_ = await running.ask(PROMPT)
        await running.overwrite()
        assert await running.ask(PROMPT) == (first, 10 * BLOCK, 10 * BLOCK)


async def test_what_host_memory_has_no_room_for_is_gone(profile: Path) -> None:
    async with fleet(profile, 1, host_tokens=20 * BLOCK) as running:
        await running.ask(PROMPT)
        await running.overwrite()
        _, expected, found = await running.ask(PROMPT)
        assert (expected, found) == (0, 0)


async def test_a_reset_leaves_what_host_memory_has(profile: Path) -> None:
    async with fleet(profile, 1, host_tokens=100 * BLOCK) as running:
        await running.ask(PROMPT)
        async with aiohttp.ClientSession(running.replicas[0].url) as http, http.post("/reset_prefix_cache") as answer:
            assert (await answer.json())["success"]
        assert (await running.ask(PROMPT))[1:] == (10 * BLOCK, 10 * BLOCK)


async def test_what_one_replica_has_stored_another_can_load(profile: Path, tmp_path: Path) -> None:
    (store := tmp_path / "store").mkdir()
    async with fleet(profile, 2, store=str(store)) as running:
        first, *_ = await running.ask(PROMPT)
        await running.overwrite()
        assert (await running.ask(PROMPT))[1:] == (10 * BLOCK, 10 * BLOCK)
        other = next(server for server in running.replicas if server.url != first)
        async with (
            aiohttp.ClientSession(other.url) as http,
            http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}) as answer,
        ):
            usage = (await answer.json())["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 10 * BLOCK, "it never saw the prompt"
