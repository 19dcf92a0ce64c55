"""Real Envoy before emulated replicas, asking a picker that runs as its users start it."""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from preble.engines.starting.commands import Command
from preble.engines.starting.launch import Fleet, LaunchOptions, ReplicaProcess
from preble.engines.starting.ports import free_ports
from support.envoy import running_envoy
from support.servers import require_server
from support.waiting import eventually

pytestmark = [pytest.mark.envoy, pytest.mark.timeout(600)]

KV_TOKENS = 40_000
PREFIXES = 40
READY_S = 120.0


@pytest.fixture(autouse=True)
def envoy_is_set_up() -> None:
    require_server("envoy", "envoy")


class Cluster:
    """Envoy, a picker, and emulated replicas, each a process of its own."""

    def __init__(self, url: str, picker: ReplicaProcess, fleet: Fleet, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.picker = picker
        self.fleet = fleet
        self.http = http

    async def complete(self, prompt: str | list[int], max_tokens: int = 4, **fields: Any) -> tuple[int, str, bytes]:
        """The status, the replica that the picker names, and the body."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, **fields}
        async with self.http.post(f"{self.url}/v1/completions", json=body) as answer:
            return answer.status, answer.headers.get("x-preble-replica", ""), await answer.read()

    async def page(self, url: str) -> str:
        async with self.http.get(url) as answer:
            return await answer.text()

    async def in_flight(self) -> float:
        """As the picker counts."""
        text = await self.page(f"{self.picker.url}/metrics")
        return sum(map(float, re.findall(r"^preble_in_flight\{.*\} (\S+)$", text, re.MULTILINE)))

    async def ended(self) -> bool:
        return await self.in_flight() == 0

    async def num_up(self) -> int:
        text = await self.page(f"{self.picker.url}/metrics")
        return len(re.findall(r"^preble_replica_up\{.*\} 1.0$", text, re.MULTILINE))

    async def hit_rate(self) -> float:
        """By the replicas' own counters."""
        queries = hits = 0.0
        for url in self.fleet.urls:
            text = await self.page(f"{url}/metrics")
            queries += sum(map(float, re.findall(r"^vllm:prefix_cache_queries_total\S* (\S+)$", text, re.MULTILINE)))
            hits += sum(map(float, re.findall(r"^vllm:prefix_cache_hits_total\S* (\S+)$", text, re.MULTILINE)))
        return hits / queries

    async def served(self) -> bool:
        return (await self.complete("hello"))[0] == 200


@asynccontextmanager
async def cluster(folder: Path, *picker_args: str, replicas: int = 3, speed: float = 20.0) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        emulator = ("--speed", f"{speed:g}")
        options = LaunchOptions(
            engine="emulator",
            replicas=replicas,
            log_dir=folder,
            profile="a100-mistral-7b",
            kv_tokens=KV_TOKENS,
            extra_args=emulator,
        )
        fleet = await stack.enter_async_context(Fleet(options))
        port, grpc_port = free_ports(2)
        argv = [sys.executable, "-m", "preble", "epp", "--port", str(port), "--grpc-port", str(grpc_port), *picker_args]
        for url in fleet.urls:
            argv += ["--replica", url]
        picker = ReplicaProcess("picker", Command(tuple(argv), dict(os.environ), port), folder / "picker.log")
        stack.push_async_callback(picker.stop)
        await picker.start()
        await picker.wait_ready(READY_S)
        endpoints = [url.partition("//")[2] for url in fleet.urls]
        url = await stack.enter_async_context(running_envoy(grpc_port, endpoints, folder))
        timeout = aiohttp.ClientTimeout(total=READY_S)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        )
        found = Cluster(url, picker, fleet, http)

        async def joined() -> bool:
            return await found.num_up() == replicas

        await eventually(joined)
        await eventually(found.served)
        yield found
        if picker.is_alive:
            await eventually(found.ended)


def prompts(count: int) -> list[str]:
    """Popular prefixes of about 900 tokens, each with an end of its own."""
    rng = random.Random(1)
    prefixes = [" ".join(f"{rng.randrange(1000)}" for _ in range(900)) for _ in range(PREFIXES)]
    chosen = rng.choices(prefixes, [1 / (rank + 1) ** 1.1 for rank in range(PREFIXES)], k=count)
    return [f"{prefix} {number}" for number, prefix in enumerate(chosen)]


async def hit_rate(folder: Path, policy: str) -> float:
    async with cluster(folder, "--policy", policy) as one:
        at_once = asyncio.Semaphore(8)

        async def ask(prompt: str) -> int:
            async with at_once:
                return (await one.complete(prompt))[0]

        assert set(await asyncio.gather(*map(ask, prompts(240)))) == {200}
        return await one.hit_rate()


async def test_placements_are_obeyed_the_replicas_find_more_in_their_caches(tmp_path: Path) -> None:
    in_turns = await hit_rate(tmp_path / "round_robin", "round_robin")
    placed = await hit_rate(tmp_path / "preble", "preble")
    assert placed > in_turns + 0.05, (placed, in_turns)


async def test_each_request_reaches_the_replica_that_was_chosen_with_its_body(tmp_path: Path) -> None:
    async with cluster(tmp_path) as one:
        found = [await one.complete("one and the same prompt " * 40) for _ in range(4)]
        assert [status for status, _, _ in found] == [200] * 4 and len({replica for _, replica, _ in found}) == 1
        body = {"prompt": "hello", "max_tokens": 3, "stream": False, "padding": "x" * 1_000_000}
        async with one.http.post(f"{one.url}/v1/completions", json=body) as answer:
            assert answer.status == 200 and (await answer.json())["usage"]["completion_tokens"] == 3
        answers = await asyncio.gather(*(one.complete(f"{number} at once", max_tokens=20) for number in range(64)))
        assert [status for status, _, _ in answers] == [200] * 64
        assert all(answer.endswith(b"data: [DONE]\n\n") for _, _, answer in answers)
        assert "a100" in await one.page(f"{one.url}/v1/models") or "data" in await one.page(f"{one.url}/v1/models")
        status, _, text = await one.complete([1] * (KV_TOKENS + 1))
        assert status == 400 and b"context_length_exceeded" in text, "the picker's own words"


async def test_clients_that_leave_release_what_they_took(tmp_path: Path) -> None:
    async with cluster(tmp_path, speed=1.0) as one:

        async def leave() -> None:
            body = {"prompt": "a long answer", "max_tokens": 5000, "stream": True}
            async with one.http.post(f"{one.url}/v1/completions", json=body) as answer:
                await answer.content.readany()

        await asyncio.gather(*(leave() for _ in range(10)))
        await eventually(one.ended)
        text = await one.page(f"{one.picker.url}/debug/decisions")
        assert text.count('"aborted"') == 10


async def test_a_dead_replica_costs_no_request_and_a_dead_picker_is_asked_again_when_it_is_back(tmp_path: Path) -> None:
    async with cluster(tmp_path) as one:
        await one.fleet.replicas[0].kill()
        answers = await asyncio.gather(*(one.complete(f"{number}" * 50) for number in range(40)))
        assert [status for status, _, _ in answers] == [200] * 40, "Envoy tries the next of our endpoints"
        await one.picker.kill()
        assert (await one.complete("hello"))[0] in (500, 503)
        await one.picker.start()
        await one.picker.wait_ready(READY_S)
        await eventually(one.served)
