"""Chats with images: what they are expected to find cached is what they find, and never another image's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from preble.config import ReplicaConfig
from preble.emulator import EmulatorConfig, EmulatorServer
from preble.gateway.server import Gateway
from support.gateways import gateway_before
from support.images import AFTER, QUESTION, chat_about
from support.waiting import eventually

BLOCK = 16
IMAGE = 50
"""Tokens of an image: no whole number of blocks."""


class Asking:
    """A client of a gateway before one emulated replica."""

    def __init__(self, replica: EmulatorServer, gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.replica = replica
        self.gateway = gateway
        self.http = http

    async def is_in_step(self) -> bool:
        """Whether every event that the replica has published has arrived."""
        [live] = self.gateway.serving.replicas.values()
        streams = live.engine._streams._streams
        published = [publisher.position for publisher in self.replica.publishers]
        return [stream.position for stream in streams] == published

    async def about(self, *seeds: int, **fields: Any) -> tuple[int, int]:
        """Tokens that were expected to be cached, and those that were."""
        await eventually(self.is_in_step, "every event has arrived")
        async with self.http.post("/v1/chat/completions", json=chat_about(*seeds, **fields)) as answer:
            body = await answer.json()
            assert answer.status == 200, body
            cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            return int(answer.headers["x-preble-matched-tokens"]), cached


@asynccontextmanager
async def asking(events_port: int | None, **settings: Any) -> AsyncIterator[Asking]:
    emulated = EmulatorConfig(
        profile="tiny-cpu", speed=50.0, events_port=events_port, image_tokens=IMAGE, block_size=BLOCK, kv_tokens=16_000
    )
    async with (
        EmulatorServer(emulated) as replica,
        gateway_before([ReplicaConfig(replica.url)], profile="tiny-cpu", **settings) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        yield Asking(replica, gateway, http)


@pytest.fixture(params=[0, None], ids=["with events", "without events"])
async def ask(request: pytest.FixtureRequest) -> AsyncIterator[Asking]:
    async with asking(request.param) as client:
        yield client


def texts(prompt: str) -> int:
    """Whole blocks of tokens of the question before the image, less the message's first token or two."""
    return len(prompt) // 6 // BLOCK * BLOCK


async def test_six_images_with_one_question_share_the_question_alone(ask: Asking) -> None:
    found = [await ask.about(seed) for seed in range(6)]
    assert found[0] == (0, 0)
    assert {expected for expected, _ in found[1:]} == {found[1][0]}
    assert 0 < found[1][0] < texts(QUESTION) * 2
    assert all(expected == cached for expected, cached in found)


async def test_the_same_image_is_found_again_with_what_follows_it(ask: Asking) -> None:
    await ask.about(1)
    [_, (other, _), (expected, cached)] = [await ask.about(1), await ask.about(2), await ask.about(1)]
    assert expected == cached > other + IMAGE, "the image, and text after it"


async def test_a_second_image_is_compared_too(ask: Asking) -> None:
    def pair(first: int, second: int) -> list[dict[str, Any]]:
        return [*chat_about(first)["messages"], *chat_about(second, after="")["messages"]]

    await ask.about(messages=pair(1, 2))
    once = sum(await ask.about(messages=pair(1, 3)))
    assert once > 0
    both = sum(await ask.about(messages=pair(1, 2)))
    assert both > once
    expected, cached = await ask.about(messages=pair(1, 4))
    assert expected == cached == once / 2 > IMAGE


async def test_images_with_nothing_between_them_are_no_others(ask: Asking) -> None:
    await ask.about(1, 2)
    alone, _ = await ask.about(9)
    assert (await ask.about(1, 3))[0] == alone


async def test_the_order_of_images_matters(ask: Asking) -> None:
    await ask.about(1, 2)
    alone, _ = await ask.about(9)
    assert await ask.about(2, 1) == (alone, alone)


async def test_a_conversation_goes_on_behind_its_images(ask: Asking) -> None:
    first = chat_about(1)["messages"]
    more = [*first, {"role": "assistant", "content": "A cat."}, *chat_about(2)["messages"]]
    await ask.about(1)
    expected, cached = await ask.about(0, messages=more)
    assert expected == cached > IMAGE + texts(QUESTION)


async def test_a_salt_keeps_the_same_image_apart(ask: Asking) -> None:
    await ask.about(1, cache_salt="mine")
    assert await ask.about(1, cache_salt="yours") == (0, 0)
    expected, cached = await ask.about(1, cache_salt="mine")
    assert expected == cached > IMAGE


async def test_an_id_of_the_clients_own_identifies_an_image(ask: Asking) -> None:
    """vLLM's `uuid` of a part: the engine goes by it and does not hash the image."""

    def named(name: str) -> dict[str, Any]:
        parts = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": None, "uuid": name}]
        return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": AFTER}]}]}

    await ask.about(**named("cat"))
    alone, _ = await ask.about(**named("dog"))
    expected, cached = await ask.about(**named("cat"))
    assert expected == cached > alone + IMAGE
