"""A real SGLang replica whose KV cache is too small for what runs: retractions, with Preble's order in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import pytest

from support.replicas import KV_TOKENS, MODEL_NAME, Replica, prompt_of
from support.waiting import eventually

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

LONG_PROMPT, LONG_OUTPUT = 100, 1050
"""SGLang admits two such requests, reckoning with 0.7 of the output of the one that runs; in the end both do not fit.
It reckons with all of it where `ignore_eos` is set, so `min_tokens` it is."""

assert 2 * LONG_PROMPT + 2 * LONG_OUTPUT > KV_TOKENS > 2 * LONG_PROMPT + 1.7 * LONG_OUTPUT
PATIENCE_S = 240.0
"""Until something is to have happened that takes some seconds of work; a busy machine takes many times as long."""


class SglangReplica(Replica):
    """The same plain questions, asked as SGLang wants them."""

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> int:
        """Run a prompt. Returns the number of tokens that were generated."""
        body = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": max_tokens, "min_tokens": max_tokens}
        async with self._session.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            return int((await response.json())["usage"]["completion_tokens"])

    async def load(self) -> dict[str, Any]:
        async with self._session.get(f"{self.url}/v1/loads") as response:
            loads: list[dict[str, Any]] = (await response.json())["loads"]
            return loads[0]

    async def num_waiting(self) -> float:
        return float((await self.load())["num_waiting_reqs"])

    async def num_running(self) -> float:
        return float((await self.load())["num_running_reqs"])

    async def num_retracted(self) -> float:
        """Since the start. The metric is there from the first one on."""
        async with self._session.get(f"{self.url}/metrics") as response:
            is_there = "\nsglang:num_retracted_requests_total{" in await response.text()
        return await self.metric("sglang:num_retracted_requests_total") if is_there else 0.0

    async def is_empty(self) -> bool:
        """Whether nothing runs, waits or holds memory, once its cache is flushed; it is not while anything runs."""
        async with self._session.post(f"{self.url}/flush_cache") as response:
            if response.status != 200:
                return False
        load = await self.load()
        return not (load["num_running_reqs"] or load["num_waiting_reqs"] or load["num_used_tokens"])


@pytest.fixture
async def replica(sglang_url: str) -> AsyncIterator[SglangReplica]:
    """Idle, its cache empty; and so it has to be left."""
    # No kept connections: the engine closes those that idle, and a POST on one that it just closed fails.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        one = SglangReplica(sglang_url, session)
        await eventually(one.is_empty, "nothing is left of other tests", PATIENCE_S)
        yield one
        await eventually(one.is_empty, "nothing is left in the engine", PATIENCE_S)


async def test_retracted_requests_get_all_their_tokens(replica: SglangReplica) -> None:
    before = await replica.num_retracted()
    generated = await asyncio.gather(*(replica.generate(prompt_of(i, LONG_PROMPT), LONG_OUTPUT) for i in range(2)))
    assert generated == [LONG_OUTPUT] * 2
    assert await replica.num_retracted() > before


async def test_a_client_that_leaves_its_retracted_request_leaves_nothing_behind(replica: SglangReplica) -> None:
    before = await replica.num_retracted()
    async with asyncio.TaskGroup() as tasks:
        requests = [tasks.create_task(replica.generate(prompt_of(10 + i, LONG_PROMPT), LONG_OUTPUT)) for i in range(2)]

        async def one_is_retracted() -> bool:
            return await replica.num_retracted() > before or all(request.done() for request in requests)

        await eventually(one_is_retracted, "one is retracted", PATIENCE_S)
        for request in requests:
            request.cancel()
    assert all(request.cancelled() for request in requests), "it was retracted before its end"


async def test_120_requests_with_retractions_and_disconnects_leave_nothing(replica: SglangReplica) -> None:
    before = await replica.num_retracted()
    prefixes = [prompt_of(400 + i, 256) for i in range(3)]

    async def run(number: int) -> bool:
        """Whether it was answered in full."""
        if number % 30 == 0:
            return await replica.generate(prompt_of(500 + number, LONG_PROMPT), LONG_OUTPUT) == LONG_OUTPUT
        return await replica.generate([*prefixes[number % 3], *prompt_of(500 + number, 40)], 4) == 4

    async with asyncio.TaskGroup() as tasks:
        requests = [tasks.create_task(run(number)) for number in range(120)]

        async def most_wait() -> bool:
            return await replica.num_waiting() >= 90

        await eventually(most_wait, "most of them wait", PATIENCE_S)
        num_cancelled = sum(request.cancel() for request in requests[5::9])
    answered = [request.result() for request in requests if not request.cancelled()]
    assert num_cancelled > 0
    assert answered == [True] * (120 - num_cancelled)
    assert await replica.num_retracted() > before
