"""Requests with lists of prompts: they take turns with others, and their memory is counted before it is taken."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any, cast

import pytest

from gateway.conftest import Serve, Served
from gateway.fakes import answer, gated, replicas
from preble.config import LimitsConfig
from preble.errors import EngineGone
from preble.gateway.http import bodies
from preble.gateway.http.page_client import CLIENT_GONE
from preble.gateway.requests import prompt_list
from preble.gateway.requests.attempt import Attempt
from preble.gateway.requests.json_requests import JsonRequest
from preble.gateway.requests.prompt_list import _merged
from preble.gateway.requests.relay import Relay, RelayOwner
from preble.serving import ParsedRequest
from support.waiting import PATIENCE_S, eventually

FEW_AT_ONCE = LimitsConfig(prompts_at_once=4)


@pytest.mark.parametrize("stream", [False, True])
async def test_some_of_the_prompts_are_at_work_at_once_and_others_get_their_turn(serve: Serve, stream: bool) -> None:
    async with replicas(2) as fakes, serve(fakes, limits=FEW_AT_ONCE) as gateway:
        for fake in fakes:
            fake.script.extend([gated] * 2 + [answer] + [gated] * 20)
        prompts = [f"prompt {i}" for i in range(20)]
        whole = asyncio.create_task(sent(gateway, prompt=prompts, stream=stream))
        await eventually(lambda: sum(fake.running for fake in fakes) == 4)
        assert (await gateway.complete(prompt="another client"))[0] == 200
        assert sum(fake.running for fake in fakes) == 4
        for fake in fakes:
            fake.gate.set()
        code, raw = await whole
        assert code == 200 and all(f"{prompt}:0".encode() in raw for prompt in prompts)


async def sent(gateway: Served, **fields: Any) -> tuple[int, bytes]:
    async with gateway.http.post("/v1/completions", json=fields) as got:
        return got.status, await got.read()


async def test_the_choices_are_in_order_whatever_ends_first(serve: Serve) -> None:
    async with replicas(2) as fakes, serve(fakes, limits=FEW_AT_ONCE) as gateway:
        prompts = [f"prompt {i}" for i in range(30)]
        _, body, _ = await gateway.complete(prompt=prompts, n=2)
        assert [choice["text"] for choice in body["choices"]] == [f"{p}:{j}" for p in prompts for j in range(2)]
        assert [choice["index"] for choice in body["choices"]] == list(range(60))


async def test_the_memory_of_the_bodies_at_work_is_counted_before_it_is_taken(serve: Serve) -> None:
    limits = LimitsConfig(prompts_at_once=10, max_body_bytes=100_000)
    async with replicas(1) as [one], serve([one], limits=limits) as gateway:
        one.script.extend([gated] * 10)
        prompts = ["a"] * 100
        first = asyncio.create_task(gateway.complete(prompt=prompts, user="u" * 90_000))
        await eventually(lambda: one.running == 10)
        held = 11 * 90_000
        assert held <= await body_bytes(gateway) <= held + 10_000
        one.gate.set()
        assert (await first)[0] == 200
        await nothing_held(gateway)


async def test_where_there_is_no_room_for_the_bodies_the_request_is_refused(serve: Serve) -> None:
    limits = LimitsConfig(prompts_at_once=100, max_body_bytes=100_000)
    async with replicas(1) as [one], serve([one], limits=limits) as gateway:
        code, body, headers = await gateway.complete(prompt=["a"] * 100, user="u" * 90_000)
        assert (code, body["error"]["code"], headers["retry-after"]) == (429, "overloaded", "1")
        assert one.requests == []
        await nothing_held(gateway)


async def body_bytes(gateway: Served) -> float:
    [line] = [line for line in (await gateway.metrics()).splitlines() if line.startswith("preble_body_bytes ")]
    return float(line.split()[1])


async def nothing_held(gateway: Served) -> None:
    """Wait until the end of the last request, which may come after its client has the answer."""
    async with asyncio.timeout(PATIENCE_S):
        while await body_bytes(gateway):  # noqa: ASYNC110 (only a scrape tells)
            await asyncio.sleep(0.01)


async def test_lists_that_are_given_up_do_not_stay_in_memory(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The automatic collector is off here: in a gateway it hardly ever looks at old objects."""
    monkeypatch.setattr(bodies, "_TIMES_ITS_OWN", 0)  # ships 20
    limits = LimitsConfig(prompts_at_once=10, max_body_bytes=100_000)
    async with replicas(1) as [one], serve([one], limits=limits) as gateway:
        gc.collect()
        gc.disable()
        before = parsed_requests()  # a test that has failed keeps its own
        try:
            for _ in range(3):
                one.script.extend([gated] * 10)
                request = asyncio.create_task(gateway.complete(prompt=["a"] * 20, user="u" * 90_000))
                await eventually(lambda: one.running == 10)
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
                await gateway.idle()
                one.script.clear()
            assert len(parsed_requests()) <= len(before) + 1, "all but perhaps the last one have gone"
        finally:
            gc.enable()


def parsed_requests() -> list[ParsedRequest]:
    return [found for found in gc.get_objects() if isinstance(found, ParsedRequest)]


@pytest.mark.plain
async def test_an_answer_that_comes_as_another_prompt_fails_meets_nobody_who_waits() -> None:
    """Its placement ends as well, and the connection to its replica stays."""
    relay = Carried()
    waiting = asyncio.create_task(prompt_list._carried(cast(Relay, relay), None))
    await asyncio.sleep(0)
    waiting.cancel()
    relay.owner.carried(cast(Attempt, object()))
    relay.owner.not_carried(EngineGone("too late as well"))
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert relay.is_aborted


def test_what_a_replica_streams_when_the_client_has_just_gone_goes_nowhere() -> None:
    client = Leaving()
    merged = prompt_list._MergedStream(cast(JsonRequest, client), "cmpl-1")
    merged.write({"choices": [{"index": 0}]})
    client.leave()
    merged.write({"choices": [{"index": 0}]})
    assert client.num_written == 1


class Leaving:
    """The seam of a client, whose connection takes nothing any more once it has gone."""

    status: int | None = None
    is_streaming = False
    num_written = 0

    def begin(self, status: int, headers: object) -> None:
        self.status, self.is_streaming = status, True

    def write(self, data: bytes) -> None:
        self.num_written += 1

    def pause_if_full(self) -> None: ...

    def leave(self) -> None:
        self.status, self.is_streaming = CLIENT_GONE, False


class Carried:
    """The seam of one prompt's relay."""

    owner: RelayOwner
    is_aborted = False

    async def begin(self, owner: RelayOwner, sink: object) -> None:
        self.owner = owner

    def abort(self) -> None:
        self.is_aborted = True


def test_details_of_generated_tokens_are_summed() -> None:
    """SGLang and vLLM count those of reasoning."""
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    details = {"completion_tokens_details": {"reasoning_tokens": 2, "audio_tokens": None}}
    answers = [{"choices": [{"index": 0}], "usage": usage | more} for more in (details, {}, details)]
    merged = json.loads(_merged([json.dumps(answer).encode() for answer in answers], 1))
    assert merged["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert "completion_tokens_details" not in json.loads(_merged([json.dumps(answers[1]).encode()], 1))["usage"]
