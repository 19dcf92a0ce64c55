"""One model on two engines: a vLLM and an SGLang replica behind one gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from preble.config import ReplicaConfig, SchedulerConfig
from preble.gateway.server import Gateway
from support.gateways import gateway_before, idle
from support.questions import prompt_of
from support.replicas import MODEL_NAME, TEST_TIMEOUT_S, TINY_MODEL, VllmPair

pytestmark = [pytest.mark.vllm, pytest.mark.sglang, pytest.mark.timeout(TEST_TIMEOUT_S)]


@pytest.fixture
async def gateway(vllm_pair: VllmPair, sglang_url: str) -> AsyncIterator[Gateway]:
    replicas = (ReplicaConfig(vllm_pair.urls[0]), ReplicaConfig(sglang_url))
    # A prompt counts as held for longer than a busy machine needs to report it.
    scheduler = SchedulerConfig(report_grace_s=60.0)
    settings = {"tokenizer": str(TINY_MODEL), "profile": "tiny-cpu", "scheduler": scheduler}
    async with gateway_before(replicas, **settings) as running:
        yield running
        await idle(running)


async def complete(http: aiohttp.ClientSession, **fields: Any) -> tuple[dict[str, Any], str, int]:
    """The answer, the replica that gave it, and the tokens that were believed to match."""
    body = {"model": MODEL_NAME, "max_tokens": 2, "temperature": 0, **fields}
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json(), answer.headers["x-preble-replica"], int(answer.headers["x-preble-matched-tokens"])


async def test_each_engine_serves_what_it_caches(gateway: Gateway) -> None:
    async with aiohttp.ClientSession(gateway.url) as http:
        prompts = [prompt_of(4000 + i, 320) for i in range(6)]
        homes = [(await complete(http, prompt=prompt))[1] for prompt in prompts]
        assert len(set(homes)) == 2, "both engines are used"
        for prompt, home in zip(prompts, homes, strict=True):
            answer, replica, matched = await complete(http, prompt=[*prompt, 9, 9, 9])
            assert replica == home
            assert matched == answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_chat_is_the_same_tokens_on_both(gateway: Gateway) -> None:
    chat = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "import os"}], "max_tokens": 1}
    counts = {}
    for url in gateway.serving.replicas:
        async with aiohttp.ClientSession(str(url)) as engine, engine.post("/v1/chat/completions", json=chat) as answer:
            counts[url] = (await answer.json())["usage"]["prompt_tokens"]
    assert len(set(counts.values())) == 1
    async with aiohttp.ClientSession(gateway.url) as http, http.post("/v1/chat/completions", json=chat) as answer:
        assert (await answer.json())["usage"]["prompt_tokens"] in counts.values()
