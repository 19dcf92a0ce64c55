"""Emulated replicas of fixed roles: what they do together, and each way in which SGLang's leave a router alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from preble.core.costs.model import CostModel
from preble.core.types import Role
from preble.emulator import EmulatorConfig, EmulatorServer
from preble.emulator.pairs import rooms
from preble.emulator.pairs.decoding import SharedRoom
from preble.emulator.pairs.rooms import PairFailed, Prefill, Wanted
from preble.profiles import load_profile
from support.linked import KV_BYTES, linked_profile
from support.pairs import NO_TRANSFER, Pair
from support.waiting import eventually

MODEL = "tiny-cpu"
BLOCK = 16
PROMPT = list(range(100, 100 + 10 * BLOCK + 5))
OTHER = [token + 1000 for token in PROMPT]
FAST = 1000.0
"""So long waits last a third of a second."""


@dataclass(frozen=True)
class Emulated:
    prefill: EmulatorServer
    decode: EmulatorServer
    pair: Pair

    async def waits(self, server: EmulatorServer, number: int) -> None:
        await eventually(partial(self.pair.has_waiting, server.url, number), f"{number} wait for their other leg")


@asynccontextmanager
async def emulated(profile: str = MODEL, **decode: Any) -> AsyncIterator[Emulated]:
    """Start two. `decode`: settings of the one that decodes; speed and ranks are of both."""
    settings: dict[str, Any] = {"profile": profile, "model": MODEL}
    settings |= {name: decode.pop(name) for name in ("speed", "data_parallel_size", "mooncake") if name in decode}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        first = await enter(EmulatorServer(EmulatorConfig(role=Role.PREFILL, **settings)))
        second = await enter(EmulatorServer(EmulatorConfig(role=Role.DECODE, **settings, **decode)))
        http = await enter(aiohttp.ClientSession())
        yield Emulated(first, second, Pair(http, first.url, second.url, first.bootstrap_port, MODEL))


async def whole_text(prompt: list[int], **more: Any) -> str:
    """Return what a replica without a role answers."""
    async with EmulatorServer(EmulatorConfig(profile=MODEL)) as server, aiohttp.ClientSession() as http:
        pair = Pair(http, server.url, server.url, 0, MODEL)
        return (await pair.ask(server.url, pair.body(prompt, **more))).text


async def test_one_computes_a_token_and_the_other_says_the_rest() -> None:
    async with emulated() as both:
        for cached in (0, 10 * BLOCK):
            prefilled, decoded = await both.pair.answered(PROMPT)
            assert (prefilled.status, decoded.status) == (200, 200)
            assert (prefilled.num_tokens, decoded.num_tokens) == (1, 4)
            assert (prefilled.cached_tokens, decoded.cached_tokens) == (cached, cached), (
                "what was cached is the first's"
            )
            assert decoded.text == await whole_text(PROMPT)
            assert decoded.text.startswith(prefilled.text)


@pytest.mark.parametrize("is_late", ["prefill", "decode"])
async def test_either_leg_may_come_late(is_late: str) -> None:
    async with emulated() as both:
        pair, body = both.pair, {**both.pair.body(PROMPT), **both.pair.room()}
        first, then = (pair.decode, pair.prefill) if is_late == "prefill" else (pair.prefill, pair.decode)
        early = asyncio.create_task(pair.ask(first, body))
        await both.waits(both.decode if is_late == "prefill" else both.prefill, 1)
        assert both.prefill.engine.scheduler.stats.prefix_queries == 0, "nothing is computed before both are there"
        answers = [await pair.ask(then, body), await early]
        assert [answer.status for answer in answers] == [200, 200]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
async def test_a_request_that_names_no_room_is_refused(path: str) -> None:
    async with emulated() as both:
        plain = {"prompt": "hi", "text": "hi", "messages": [{"role": "user", "content": "hi"}]}
        for url in (both.pair.prefill, both.pair.decode):
            answer = await both.pair.ask(url, plain, path)
            assert (answer.status, answer.fields["code"]) == (400, 400)
            assert "without bootstrap room id" in answer.fields["message"]
            streamed = await both.pair.ask(url, {**plain, "stream": True}, path)
            [event] = streamed.fields
            assert (streamed.status, event["error"]["code"]) == (200, 400), "a stream has begun before it is looked at"


async def test_health_checks_need_no_other_leg() -> None:
    async with emulated() as both:
        body = {**both.pair.body(PROMPT), **NO_TRANSFER}
        prefilled, decoded = await both.pair.both(body)
        right = await whole_text(PROMPT)
        assert right.startswith(prefilled.text)
        assert decoded.text != right, "it had no KV"


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_one_leg_alone_waits_until_its_client_leaves(leg: str) -> None:
    async with emulated() as both:
        pair, server = both.pair, both.prefill if leg == "prefill" else both.decode
        alone = asyncio.create_task(pair.ask(server.url, {**pair.body(PROMPT), **pair.room()}))
        await both.waits(server, 1)
        alone.cancel()
        await both.waits(server, 0)
        assert [answer.status for answer in await pair.answered(PROMPT)] == [200, 200]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_one_leg_alone_fails_in_the_end(leg: str) -> None:
    async with emulated(speed=FAST) as both:
        server = both.prefill if leg == "prefill" else both.decode
        answer = await both.pair.ask(server.url, {**both.pair.body(PROMPT), **both.pair.room()})
        assert answer.status == 500
        assert "KVTransferError" in answer.fields["message"]


async def test_nobody_hears_that_the_other_leg_has_failed() -> None:
    async with emulated() as both:
        pair, body = both.pair, {**both.pair.body(PROMPT), **both.pair.room()}
        decoding = asyncio.create_task(pair.ask(pair.decode, body))
        await both.waits(both.decode, 1)
        assert (await pair.ask(pair.prefill, {**body, "model": "another"})).status == 404
        await both.waits(both.decode, 1)
        decoding.cancel()
        await both.waits(both.decode, 0)


async def test_a_room_may_be_used_again_after_its_end() -> None:
    async with emulated() as both:
        room = both.pair.room()
        for prompt in (PROMPT, OTHER):
            _, decoded = await both.pair.both({**both.pair.body(prompt), **room})
            assert decoded.text == await whole_text(prompt)


async def test_two_requests_in_one_room_get_a_wrong_text_and_none() -> None:
    async with emulated() as both:
        pair, room = both.pair, both.pair.room()
        mine, theirs = ({**pair.body(prompt), **room} for prompt in (PROMPT, OTHER))
        waiting = [asyncio.create_task(pair.ask(pair.decode, mine))]
        await both.waits(both.decode, 1)
        waiting.append(asyncio.create_task(pair.ask(pair.decode, theirs)))
        prefilled = await pair.ask(pair.prefill, theirs)
        decoded = await waiting[0]
        assert (prefilled.status, decoded.status) == (200, 200)
        assert decoded.text != await whole_text(PROMPT)
        assert not waiting[1].done()
        waiting[1].cancel()


async def test_room_0_is_none_for_the_one_that_decodes() -> None:
    async with emulated(speed=FAST) as both:
        prefilling = asyncio.create_task(
            both.pair.ask(both.pair.prefill, {**both.pair.body(PROMPT), **both.pair.room(bootstrap_room=0)})
        )
        decoded = await both.pair.ask(both.pair.decode, {**both.pair.body(PROMPT), **both.pair.room(bootstrap_room=0)})
        assert decoded.status == 500
        prefilling.cancel()


async def test_several_answers_end_the_engine_that_decodes() -> None:
    with pytest.raises(SharedRoom):
        async with emulated() as both:
            answer = await both.pair.ask(both.pair.decode, {**both.pair.body(PROMPT, n=2), **both.pair.room()})
            assert answer.status == 400
            await both.decode.failed()


async def test_prompts_of_a_list_take_the_rooms_that_follow() -> None:
    async with emulated() as both:
        prefilled, decoded = await both.pair.answered([PROMPT, OTHER])
        texts = [choice["text"] for choice in decoded.fields["choices"]]
        assert texts == [await whole_text(PROMPT), await whole_text(OTHER)]
        assert prefilled.num_tokens == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/generate"])
async def test_pairs_answer_at_every_endpoint(path: str) -> None:
    async with emulated() as both:
        words = {"text": "hello", "input": "hello", "messages": [{"role": "user", "content": "hello"}]}
        limits = {"max_tokens": 4, "max_output_tokens": 4, "sampling_params": {"max_new_tokens": 4}}
        answers = await both.pair.both({**words, **limits, **both.pair.room()}, path)
        assert [answer.status for answer in answers] == [200, 200]


async def test_a_full_replica_keeps_its_partner_from_computing() -> None:
    async with emulated(kv_tokens=2 * len(PROMPT)) as both:
        pair = both.pair
        long = {**pair.body(PROMPT, max_tokens=len(PROMPT) - BLOCK), **pair.room(), "stream": True}
        running = pair.http.post(pair.decode + "/v1/completions", json=long)
        prefilling = asyncio.create_task(pair.ask(pair.prefill, long))
        async with running as answer:
            await answer.content.readany()
            await prefilling
            asked = asyncio.create_task(pair.answered(OTHER))
            await both.waits(both.prefill, 1)
            assert await both.pair.num_waiting(both.decode.url) == 0, "it waits for room, not for KV"
            assert not asked.done()
        assert [answer.status for answer in await asked] == [200, 200]


async def test_a_prompt_that_never_fits_is_refused() -> None:
    async with emulated(kv_tokens=4 * BLOCK) as both:
        answer = await both.pair.ask(both.pair.decode, {**both.pair.body(PROMPT), **both.pair.room()})
        assert answer.status == 400


async def test_the_link_of_the_profile_delays_the_first_token(tmp_path: Path) -> None:
    took = {}
    for rate in (1e9, KV_BYTES * len(PROMPT) / 0.3):
        profile = linked_profile(tmp_path, s_per_token=1e-6, bytes_per_s=rate, latency_s=0.0)
        async with emulated(str(profile)) as both:
            before = asyncio.get_running_loop().time()
            await both.pair.answered(PROMPT)
            took[rate] = asyncio.get_running_loop().time() - before
    assert min(took.values()) < 0.3 <= max(took.values())


@pytest.mark.parametrize("caches", [False, True])
async def test_what_is_sent_serves_the_next_prompt_only_with_a_cache(caches: bool) -> None:
    async with emulated(decode_caches=caches) as both:
        for _ in range(2):
            await both.pair.answered(PROMPT)
        assert both.decode.engine.copied_tokens == 10 * BLOCK * (1 if caches else 2)


async def test_transfers_fail_as_often_as_they_are_told_to() -> None:
    async with emulated(failures=1.0) as both:
        prefilled, decoded = await both.pair.answered(PROMPT)
        assert (prefilled.status, decoded.status) == (200, 500)
        assert "Decode transfer failed" in decoded.fields["message"]


@pytest.mark.parametrize(("mooncake", "said"), [(True, "remote mooncake session is not alive"), (False, "KV transfer")])
async def test_after_a_failed_transfer_mooncake_sends_nothing_more(mooncake: bool, said: str) -> None:
    async with emulated(failures=0.8, mooncake=mooncake) as both:
        answers = [(await both.pair.answered(PROMPT))[1] for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 500, 500], "by a fixed seed"
        assert "KV transfer failed" in answers[1].fields["message"]
        assert said in answers[2].fields["message"]


async def test_a_partner_that_cannot_be_reached_fails_the_request() -> None:
    async with emulated(speed=FAST) as both:
        gone = both.pair.room(bootstrap_port=1)
        answer = await both.pair.ask(both.pair.decode, {**both.pair.body(PROMPT), **gone})
        assert (answer.status, answer.fields["type"]) == (500, "500")
        assert "Decode handshake failed" in answer.fields["message"]


async def test_ranks_follow_from_the_room() -> None:
    async with emulated(data_parallel_size=2) as both:
        for _ in range(2):
            await both.pair.both({**both.pair.body(PROMPT), **both.pair.room(bootstrap_room=7)})
        assert [engine.scheduler.stats.prefix_queries > 0 for engine in both.prefill.engines] == [False, True]


async def test_each_says_its_role_and_where_it_prefills() -> None:
    async with emulated() as both:
        for server, role in ((both.prefill, "prefill"), (both.decode, "decode")):
            async with both.pair.http.get(server.url + "/server_info") as answer:
                info = await answer.json()
            assert (info["disaggregation_mode"], info["disable_radix_cache"]) == (role, role == "decode")
            assert info["disaggregation_bootstrap_port"] == server.bootstrap_port
            async with both.pair.http.get(server.url + "/model_info") as answer:
                assert (await answer.json())["disaggregation_mode"] == role
        async with both.pair.http.get(f"http://127.0.0.1:{both.prefill.bootstrap_port}/health") as answer:
            assert answer.status == 200


async def test_the_number_of_rooms_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "MOST_ROOMS", 1)  # ships 10,000
    prefill = Prefill(CostModel(load_profile(MODEL)), 1.0)
    first = asyncio.create_task(prefill.wanted(Wanted(1)))
    await eventually(partial(bool, prefill._rooms))
    with pytest.raises(PairFailed, match="1 rooms"):
        await prefill.wanted(Wanted(2))
    first.cancel()
    await asyncio.wait([first])
    assert not prefill._rooms
