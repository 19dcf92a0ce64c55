"""Images in chats on real vLLM, with a tiny LLaVA whose weights are noise: the gateway's belief is vLLM's cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from preble.config import ReplicaConfig
from preble.engines.media_marks import identifier_of
from preble.engines.starting.launch import Fleet
from preble.gateway.server import Gateway
from support.gateways import gateway_before
from support.images import chat_about, image_part
from support.own_vllm import make_tiny_llava, own_vllm, with_torchvision
from support.replicas import BLOCK_SIZE, MODEL_NAME, TEST_TIMEOUT_S

pytestmark = [pytest.mark.vllm, pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]

IMAGE = 64
"""Tokens of an image."""


@asynccontextmanager
async def gateway_to(url: str, tokenizer: Path | None) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    async with (
        gateway_before([ReplicaConfig(url)], tokenizer=tokenizer and str(tokenizer)) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        yield gateway, http


async def test_images_are_told_apart_as_vllm_does_it(tmp_path: Path) -> None:
    (libraries := tmp_path / "libraries").mkdir()
    path = with_torchvision(libraries)
    model = make_tiny_llava(tmp_path / "tiny-llava", path)
    extra = ("--load-format", "dummy", "--limit-mm-per-prompt", '{"image": 4}')
    async with Fleet(own_vllm(tmp_path, *extra, path=path, model=str(model), kv_tokens=8192)) as fleet:
        [url] = fleet.urls
        for number, tokenizer in enumerate([None, model]):
            async with gateway_to(url, tokenizer) as (_, http):
                await agrees_with_vllm(http, [10 * number + i for i in range(4)])
                assert await ids_in_events(fleet) >= {identifier_of(image_part(10 * number), str(model))}


async def agrees_with_vllm(http: aiohttp.ClientSession, seeds: Sequence[int]) -> None:
    """`seeds`: of images that vLLM has not seen."""
    question = f"Number {seeds[0]}: what is on this picture? Say it in a few words, please. " * 5

    async def about(*chosen: int, **fields: Any) -> tuple[int, int, int]:
        """Tokens of the prompt, those expected to be cached, and those that were."""
        chat = chat_about(*chosen, question=question, model=MODEL_NAME, **fields)
        async with http.post("/v1/chat/completions", json=chat) as answer:
            body = await answer.json()
            assert answer.status == 200, body
            usage, matched = body["usage"], int(answer.headers["x-preble-matched-tokens"])
            return usage["prompt_tokens"], matched, usage["prompt_tokens_details"]["cached_tokens"]

    async def found(*chosen: int, **fields: Any) -> int:
        _, expected, cached = await about(*chosen, **fields)
        assert expected == cached
        return cached

    one, two, three, four = seeds
    length, expected, cached = await about(one)
    before = await found(two)
    assert expected <= cached < before
    assert await found(three) == before > BLOCK_SIZE
    assert await found(one) == (length - 1) // BLOCK_SIZE * BLOCK_SIZE >= before + IMAGE
    behind = chat_about(one, question=question)["messages"] + chat_about(two, question="And this one? ")["messages"]
    assert await found(messages=behind) > before + IMAGE, "the first image and the text after it"
    both = await found(messages=behind)
    other = chat_about(one, question=question)["messages"] + chat_about(four, question="And this one? ")["messages"]
    assert before + IMAGE < await found(messages=other) < both
    named = [{**image_part(one), "uuid": f"own-{one}"}]
    parts = [{"type": "text", "text": question}, *named, {"type": "text", "text": "And why? " * 20}]
    assert await found(messages=[{"role": "user", "content": parts}]) == before, "an identifier of the client's own"
    assert await found(messages=[{"role": "user", "content": parts}]) > before + IMAGE


async def ids_in_events(fleet: Fleet) -> set[str]:
    """Every identifier of an image that vLLM has named in its events."""
    from preble.engines import connect
    from preble.engines.kv_events.wire import WireStored
    from support.belief import raw_events

    server = connect(fleet.urls[0])
    [endpoints] = (await server.probe()).info.kv_events
    await server.close()
    stored = [event for event in await raw_events(endpoints, 0) if isinstance(event, WireStored)]
    keys = [key for event in stored for of_block in event.extra_keys or () for key in of_block or ()]
    return {key[0] for key in keys if isinstance(key, list)}
