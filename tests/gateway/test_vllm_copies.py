"""Copies of a prefix between two real vLLM with the p2p tier, by their own counters, and without their source."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import aiohttp
import pytest

from preble.config import ParityConfig, ReplicaConfig
from preble.engines.starting.launch import Fleet, ReplicaProcess
from preble.engines.starting.ports import free_ports
from preble.gateway.server import Gateway
from support.gateways import gateway_before, idle
from support.linked import linked_profile
from support.p2p_vllm import num_requests, num_under_way, p2p_vllm, prompt_tokens, shared_memory
from support.replicas import MODEL_NAME, TEST_TIMEOUT_S
from support.tiers import PROMPT, WHOLE, in_step
from support.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]


@pytest.fixture(autouse=True)
def no_memory_is_left_behind() -> AsyncIterator[None]:
    with shared_memory():
        yield  # type: ignore[misc]


@dataclass(frozen=True)
class Linked:
    """Several vLLM behind a gateway, which copy from each other."""

    fleets: Sequence[Fleet]
    gateway: Gateway

    @property
    def urls(self) -> list[str]:
        return [fleet.urls[0] for fleet in self.fleets]

    def process(self, url: str) -> ReplicaProcess:
        [process] = next(fleet for fleet in self.fleets if fleet.urls == [url]).replicas
        return process

    async def ask(self, url: str, prompt: list[int] = PROMPT) -> tuple[str, int, str]:
        """The replica, how many tokens it had, and the text."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0}
        async with aiohttp.ClientSession(url) as http, http.post("/v1/completions", json=body) as answer:
            given = await answer.json()
            assert answer.status == 200, given
            cached = given["usage"]["prompt_tokens_details"]["cached_tokens"]
            return answer.headers.get("x-preble-replica", ""), cached, given["choices"][0]["text"]

    async def ask_elsewhere(self, source: str, prompt: list[int]) -> tuple[str, int, str]:
        """Ask when the source takes no new requests, so that another must copy from it or compute."""
        with self.drained(source):
            return await self.ask(self.gateway.url, prompt)

    @contextmanager
    def drained(self, source: str) -> Iterator[None]:
        self.gateway.serving.members.wanted.drain(source)
        self.gateway.serving.members.reconcile()
        try:
            yield
        finally:
            self.gateway.serving.members.wanted.undrain(source)
            self.gateway.serving.members.reconcile()


@asynccontextmanager
async def linked(
    folder: Path, parity: ParityConfig, number: int = 2, *, latency_s: float = 10.0
) -> AsyncIterator[Linked]:
    """So many vLLM, and a gateway that believes that nearly every copy pays, and takes so long or more."""
    ports = free_ports(number)
    async with AsyncExitStack() as stack:
        fleets = [p2p_vllm(folder / str(port), port) for port in ports]
        await asyncio.gather(*(stack.enter_async_context(fleet) for fleet in fleets))
        replicas = [ReplicaConfig(f.urls[0], kv_peer=f"127.0.0.1:{p}") for f, p in zip(fleets, ports, strict=True)]
        profile = linked_profile(folder, s_per_token=0.1, bytes_per_s=1e9, latency_s=latency_s)
        given = {"profile": str(profile), "parity": parity}
        gateway = await stack.enter_async_context(gateway_before(replicas, **given))
        yield Linked(fleets, gateway)
        await idle(gateway)


async def test_a_prefix_is_copied_and_then_its_source_is_dead(tmp_path: Path) -> None:
    async with linked(tmp_path, ParityConfig(answer_s=300.0, events_s=300.0)) as two:
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

        second = [*PROMPT[:320], *range(3000, 3325)]
        _, _, wanted = await two.ask(source, second)
        await in_step(two.gateway)
        await two.process(source).kill()
        before = (await prompt_tokens(target)).copied
        replica, found, answered = await two.ask(two.gateway.url, second)
        assert (replica, answered) == (target, wanted)
        assert found in (320, WHOLE), "what was to be copied it computes, with the prefix or with the whole prompt"
        assert (await prompt_tokens(target)).copied == before


async def test_a_source_that_dies_during_a_copy_costs_its_request_nothing(tmp_path: Path) -> None:
    async with linked(tmp_path, ParityConfig(enabled=False)) as two:
        source, _, text = await two.ask(two.gateway.url)
        [target] = set(two.urls) - {source}
        await in_step(two.gateway)
        process = two.process(source)
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
        assert (await prompt_tokens(target)).copied in (0, WHOLE), (
            "its engine, a process of its own, may have sent it before"
        )


async def test_a_burst_while_sources_targets_and_clients_go_has_right_answers_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    async with linked(tmp_path, ParityConfig(enabled=False), 3, latency_s=2.0) as three:
        burst = Burst(three, Random(26))
        for goes in (None, "source", None, "target", None):
            await burst.round(goes)
        assert burst.num_answers >= 20
        assert burst.num_copied, "what this is about has happened"
        await idle(three.gateway)
        for url in burst.alive:
            await eventually(partial(_has_nothing, url), "it keeps nothing for requests or copies")


class Burst:
    """Rounds of requests that mostly copy, in each of which a replica may be killed, and some clients leave."""

    def __init__(self, fleet: Linked, rng: Random) -> None:
        self._fleet, self._rng = fleet, rng
        self.alive = list(fleet.urls)
        self.num_answers, self.num_copied = 0, 0

    async def round(self, goes: str | None) -> None:
        """Have one replica compute new prompts, and then several clients ask for them elsewhere. `goes`: is killed."""
        up = self._fleet.gateway.serving.replicas
        await eventually(lambda: set(map(str, up)) == set(self.alive), "the gateway knows who is up")
        prompts = [self._rng.choices(range(100, 4000), k=WHOLE + 5) for _ in range(3)]
        source = self._rng.choice(self.alive)
        texts = [(await self._fleet.ask(source, prompt))[2] for prompt in prompts]
        await in_step(self._fleet.gateway)
        with self._fleet.drained(source) if len(self.alive) > 1 else nullcontext():
            asking = [asyncio.create_task(self._ask(i, prompts, texts)) for i in (0, 0, 1, 1, 2, 2, 0, 1)]
            leaves = self._rng.choice(asking)
            if goes is None:
                await eventually(lambda: self._fleet.gateway.serving.num_in_flight > 0, "some are placed")
                leaves.cancel()
                await asyncio.wait(asking)
            else:
                await self._kill(goes)
                leaves.cancel()
        ends = await asyncio.gather(*asking, return_exceptions=True)
        failed = [end for end in ends if isinstance(end, Exception)]
        assert not failed, failed
        decided = self._fleet.gateway.serving.recent.latest(20)
        self.num_copied += sum(one.transferred_s is not None and not one.transfer_failed for one in decided)

    async def _ask(self, i: int, prompts: list[list[int]], texts: list[str]) -> None:
        _, _, text = await self._fleet.ask(self._fleet.gateway.url, prompts[i])
        assert text == texts[i]
        self.num_answers += 1

    async def _kill(self, which: str) -> None:
        """Kill the source or the target of a copy that is under way."""
        copies = self._fleet.gateway.serving._placements.copies
        await eventually(lambda: copies._under_way, "a copy is under way")
        placement = next(iter(copies._under_way)).placement
        assert placement.transfer is not None
        url = str(placement.transfer.source if which == "source" else placement.replica_id)
        self.alive.remove(url)
        await self._fleet.process(url).kill()


async def _has_nothing(url: str) -> bool:
    return await num_under_way(url) == 0


async def _runs_one(url: str) -> bool:
    return await num_requests(url) == 1
