"""Copies of a prefix between two real vLLM with the p2p tier, by their own counters, and without their source."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from preble.config import ParityConfig, ReplicaConfig
from preble.engines.commands import free_ports
from preble.engines.launch import Fleet
from preble.gateway.server import Gateway
from support.gateways import gateway_before, idle
from support.linked import linked_profile
from support.p2p_vllm import num_requests, p2p_vllm, prompt_tokens, shared_memory
from support.replicas import MODEL_NAME, TEST_TIMEOUT_S
from support.tiers import PROMPT, WHOLE, in_step
from support.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]

@pytest.fixture(autouse=True)
def no_memory_is_left_behind() -> AsyncIterator[None]:
    with shared_memory():
        yield  # type: ignore[misc]


@dataclass(frozen=True)
class Pair:
    """Two vLLM behind a gateway."""

    fleets: tuple[Fleet, Fleet]
    gateway: Gateway

    @property
    def urls(self) -> list[str]:
        return [fleet.urls[0] for fleet in self.fleets]

    async def ask(self, url: str, prompt: list[int] = PROMPT) -> tuple[str, int, str]:
        """The replica, how many tokens it had, and the text."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0}
        async with aiohttp.ClientSession(url) as http, http.post("/v1/completions", json=body) as answer:
            given = await answer.json()
            assert answer.status == 200, given
            cached = given["usage"]["prompt_tokens_details"]["cached_tokens"]
            return answer.headers.get("x-preble-replica", ""), cached, given["choices"][0]["text"]

    async def ask_elsewhere(self, source: str, prompt: list[int]) -> tuple[str, int, str]:
        """Ask when the source takes no new requests, so that the other must copy from it or compute."""
        self.gateway.serving.members.wanted.drain(source)
        self.gateway.serving.members.reconcile()
        try:
            return await self.ask(self.gateway.url, prompt)
        finally:
            self.gateway.serving.members.wanted.undrain(source)
            self.gateway.serving.members.reconcile()


@asynccontextmanager
async def pair(folder: Path, parity: ParityConfig) -> AsyncIterator[Pair]:
    ports = free_ports(2)
    async with AsyncExitStack() as stack:
        fleets = [p2p_vllm(folder / name, port) for name, port in zip("ab", ports, strict=True)]
        for fleet in fleets:
            await stack.enter_async_context(fleet)
        replicas = [ReplicaConfig(f.urls[0], kv_peer=f"127.0.0.1:{p}") for f, p in zip(fleets, ports, strict=True)]
        # Nearly every copy pays, and it may take long: the machine is busy.
        profile = linked_profile(folder, s_per_token=0.1, bytes_per_s=1e9, latency_s=10.0)
        given = {"profile": str(profile), "parity": parity}
        gateway = await stack.enter_async_context(gateway_before(replicas, **given))
        yield Pair((fleets[0], fleets[1]), gateway)
        await idle(gateway)


async def test_a_prefix_is_copied_and_then_its_source_is_dead(tmp_path: Path) -> None:
    async with pair(tmp_path, ParityConfig(answer_s=300.0, events_s=300.0)) as two:
        links = two.gateway.serving.scheduler._cluster.links
        await eventually(lambda: links.groups, "a copied prompt was answered as its source does", timeout_s=300.0)
        source, found, text = await two.ask(two.gateway.url)
        assert found == 0
        [target] = set(two.urls) - {source}
        await in_step(two.gateway)
        before = (await prompt_tokens(target)).copied
        assert await two.ask_elsewhere(source, PROMPT) == (target, WHOLE, text)
        assert (await prompt_tokens(target)).copied - before == WHOLE
        newest = next(one for one in two.gateway.serving.recent.latest(1))
        assert newest.transfer is not None and newest.transferred_s is not None and not newest.transfer_failed

        fleet = next(fleet for fleet in two.fleets if fleet.urls == [source])
        second = [*PROMPT[:320], *range(3000, 3325)]
        _, _, wanted = await two.ask(source, second)
        await in_step(two.gateway)
        [process] = fleet.replicas
        await process.kill()
        before = (await prompt_tokens(target)).copied
        replica, found, answered = await two.ask(two.gateway.url, second)
        assert (replica, answered) == (target, wanted)
        assert found in (320, WHOLE), "what was to be copied it computes, with the prefix or with the whole prompt"
        assert (await prompt_tokens(target)).copied == before


async def test_a_source_that_dies_during_a_copy_costs_its_request_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path, ParityConfig(enabled=False)) as two:
        source, _, text = await two.ask(two.gateway.url)
        [target] = set(two.urls) - {source}
        await in_step(two.gateway)
        [process] = next(fleet for fleet in two.fleets if fleet.urls == [source]).replicas
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)  # so that the copy is under way until it dies
        asking = asyncio.create_task(two.ask_elsewhere(source, PROMPT))
        copies = two.gateway.serving._placements.copies
        await eventually(lambda: copies.sending().total() == 1, "the copy is under way")
        await eventually(lambda: _runs_one(target), "its target has it")
        await process.kill()
        replica, found, answered = await asking
        assert (replica, answered) == (target, text)
        assert found in (0, WHOLE), "the target computes it with the copy's request, or with the client's"
        newest = next(one for one in two.gateway.serving.recent.latest(1))
        assert newest.transfer is not None and newest.transfer.source == source
        assert (await prompt_tokens(target)).copied in (0, WHOLE), "its engine, a process of its own, may have sent it before"


async def _runs_one(url: str) -> bool:
    return await num_requests(url) == 1
