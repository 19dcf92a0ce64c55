"""The gateway in front of two real vLLM replicas."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from engines.conftest import endpoints_of
from preble.config import ReplicaConfig
from preble.core.costs.model import CostModel
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import make_policy
from preble.core.types import ReplicaId, unpack_tokens
from preble.gateway.server import Gateway
from preble.profiles import load_profile
from preble.prompts.endpoints.ids import with_ids
from preble.prompts.tokens.tokenizer import PromptTokenizer
from support.gateways import gateway_before, idle
from support.questions import Replica, VllmReplica, asked, client_of
from support.replicas import TEST_TIMEOUT_S, TINY_MODEL, VllmPair
from support.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(TEST_TIMEOUT_S)]

TOOL = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hello there"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "import os"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    {"messages": [{"role": "user", "content": "find é🙂"}], "tools": [TOOL]},
    {
        "messages": [
            {"role": "user", "content": "find x"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
            {"role": "user", "content": "and?"},
        ],
        "tools": [TOOL],
    },
    {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False},
    {"messages": [{"role": "user", "content": "hi"}], "add_special_tokens": True},
    {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I would "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
]


REPORTS_TAKE_LONG = 60.0
"""Seconds for which a prompt counts as held before it is reported: more than a busy machine needs to report it."""


def e2(report_grace_s: float) -> GlobalScheduler:
    return GlobalScheduler(make_policy("e2"), CostModel(load_profile("tiny-cpu")), report_grace_s=report_grace_s)


@asynccontextmanager
async def before(vllm_pair: VllmPair, scheduler: GlobalScheduler | None = None) -> AsyncIterator[Gateway]:
    """A gateway in front of both replicas; at the end nothing may be in flight."""
    replicas = [ReplicaConfig(url) for url in vllm_pair.urls]
    async with gateway_before(replicas, scheduler, tokenizer=str(TINY_MODEL), profile="tiny-cpu") as running:
        await events_flow(running.url, vllm_pair.urls)
        yield running
        await idle(running)


async def events_flow(gateway_url: str, replicas: tuple[str, str]) -> None:
    """Return when each replica's events have begun, which they do with an empty cache."""
    async with aiohttp.ClientSession(gateway_url) as http:

        async def have_begun() -> bool:
            return all([await times_cleared(http, replica) for replica in replicas])

        await eventually(have_begun, "the events of both replicas have begun")


@pytest.fixture
async def gateway(vllm_pair: VllmPair) -> AsyncIterator[Gateway]:
    async with before(vllm_pair) as running:
        yield running


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(gateway.url) as session:
        yield session


@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
async def test_chat_tokens_are_the_engines_own(vllm_pair: VllmPair, chat: dict[str, Any]) -> None:
    async with aiohttp.ClientSession(vllm_pair.urls[0]) as session, session.post("/tokenize", json=chat) as answer:
        engines = (await answer.json())["tokens"]
    ours = PromptTokenizer(TINY_MODEL).chat(json.dumps(chat).encode())
    assert list(unpack_tokens(ours)) == engines


@pytest.mark.parametrize("special", [True, False])
async def test_completion_tokens_are_the_engines_own(vllm_pair: VllmPair, special: bool) -> None:
    text = "def f(x):\n    return {'a': x ** 2}  # é🙂 <|bos|>"
    body = {"prompt": text, "add_special_tokens": special}
    async with aiohttp.ClientSession(vllm_pair.urls[0]) as session, session.post("/tokenize", json=body) as answer:
        engines = (await answer.json())["tokens"]
    assert list(unpack_tokens(PromptTokenizer(TINY_MODEL).completion(text, special))) == engines


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_to_ids_is_the_answer_to_the_text(vllm_pair: VllmPair, stream: bool) -> None:
    text = "def f(x):\n    return {'a': x ** 2}  # é🙂 <|bos|> and some more words to go on with"
    body = {"model": "tiny", "prompt": text, "max_tokens": 8, "temperature": 0, "logprobs": 1, "stream": stream}
    ids = PromptTokenizer(TINY_MODEL).completion(text)
    in_ids = await with_ids("/v1/completions", json.dumps(body).encode(), ids)
    assert b"def f" not in in_ids
    async with aiohttp.ClientSession(vllm_pair.urls[0]) as session:
        answers = []
        for sent in (json.dumps(body).encode(), in_ids):
            headers = {"content-type": "application/json"}
            async with session.post("/v1/completions", data=sent, headers=headers) as answer:
                assert answer.status == 200
                lines = (await answer.read()).split(b"\n")
            events = [json.loads(line.removeprefix(b"data: ")) for line in lines if b"{" in line]
            answers.append("".join(choice["text"] for event in events for choice in event["choices"]))
    assert answers[0] == answers[1] != ""  # in how many events depends on the engine's speed


async def complete(http: aiohttp.ClientSession, prompt: Any, **fields: Any) -> tuple[dict[str, Any], str, int]:
    """The answer, the replica that gave it, and the tokens that were believed to match."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, **fields}
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json(), answer.headers["x-preble-replica"], int(answer.headers["x-preble-matched-tokens"])


def unique_prompt(seed: int, length: int) -> list[int]:
    """Token ids that no earlier run or test has used, from a seed and the clock."""
    start = int(time.time_ns() // 1000) % 3000
    return [8 + (start + seed * 911 + i * (seed * 2 + 7)) % 4000 for i in range(length)]


async def test_placements_follow_what_the_engines_cache(vllm_pair: VllmPair) -> None:
    async with before(vllm_pair, e2(REPORTS_TAKE_LONG)) as gateway, aiohttp.ClientSession(gateway.url) as http:
        prompts = [unique_prompt(seed, 320) for seed in range(4)]
        homes = [(await complete(http, prompt))[1] for prompt in prompts]
        for prompt, home in zip(prompts, homes, strict=True):
            body, replica, matched = await complete(http, [*prompt, 9, 9, 9])
            assert replica == home
            assert matched == body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_the_engines_events_name_the_session_of_a_request(vllm_pair: VllmPair) -> None:
    """The gateway does not need it; whoever else reads the events does."""
    context = zmq.asyncio.Context()
    events = context.socket(zmq.SUB)
    events.setsockopt(zmq.SUBSCRIBE, b"")
    try:
        for url in vllm_pair.urls:
            async with asked(VllmReplica, url) as replica, client_of(replica) as engine:
                events.connect(endpoints_of(engine).endpoint)
        async with before(vllm_pair) as gateway, aiohttp.ClientSession(gateway.url) as http:

            async def is_named() -> bool:
                body = {"model": "tiny", "prompt": unique_prompt(23, 320), "max_tokens": 2}
                await (await http.post("/v1/completions", json=body, headers={"session-id": "agent-7"})).read()
                named = set()
                while await events.poll(0):
                    _, stored, *_ = msgspec.msgpack.decode((await events.recv_multipart())[-1])
                    named |= {event.get("session_id") for event in stored if event["type"] == "BlockStored"}
                return "agent-7" in named

            await eventually(is_named, "an event names the session")
    finally:
        context.destroy(linger=0)


async def test_a_reset_of_an_engines_cache_is_believed(vllm_pair: VllmPair) -> None:
    # No grace: a prompt that has just ended would count as held for a moment, whatever is reported.
    async with before(vllm_pair, e2(0.0)) as gateway, aiohttp.ClientSession(gateway.url) as http:
        prompt = unique_prompt(17, 320)

        async def is_expected() -> bool:
            return (await complete(http, [*prompt, 8]))[2] > 0

        async def is_forgotten() -> bool:
            # Both replicas: a repeated prompt may have been placed on either. Past resets are replayed when the gateway
            # joins and are counted too, so the first ones that are counted need not be ours.
            for replica in gateway.serving.replicas:
                await reset_is_counted(http, replica)
            return (await complete(http, [*prompt, 9]))[2] == 0

        await eventually(is_expected, "the prompt is expected to be cached")
        await eventually(is_forgotten, "a reset is believed")


async def reset_is_counted(http: aiohttp.ClientSession, replica: str) -> None:
    """Empty a replica's cache and wait until the gateway has counted it."""
    before = await times_cleared(http, replica)
    async with aiohttp.ClientSession(replica) as engine:
        async with engine.post("/reset_prefix_cache") as answer:
            assert answer.status == 200
        # The engine tells of it with its next batch only.
        await (await engine.post("/v1/completions", json={"model": "tiny", "prompt": [5], "max_tokens": 1})).read()

    async def is_counted() -> bool:
        return await times_cleared(http, replica) > before

    await eventually(is_counted, "the reset is counted")


async def times_cleared(http: aiohttp.ClientSession, replica: str) -> float:
    """How often the gateway has taken in that a replica's cache is empty."""
    async with http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    name = f'preble_kv_events_total{{kind="CacheCleared",replica="{replica}"}} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(
    http: aiohttp.ClientSession, stream: bool, gateway: Gateway
) -> None:
    engines = [VllmReplica(url, http) for url in gateway.serving.replicas]
    generated = await num_generated(engines)
    fields = {"model": "tiny", "prompt": [7] * 8, "max_tokens": 900, "ignore_eos": True, "stream": stream}
    request = asyncio.create_task(http.post("/v1/completions", json=fields).__aenter__())
    await eventually(lambda: gateway.serving.num_in_flight == 1)
    if stream:
        (await request).close()
    else:
        request.cancel()
    await eventually(lambda: gateway.serving.num_in_flight == 0)
    await eventually(lambda: all_idle(engines), "the engines are idle")
    assert await num_generated(engines) < generated + 900, "it did not run to its end"


async def all_idle(engines: Sequence[Replica]) -> bool:
    return not any([await engine.num_running() for engine in engines])


async def num_generated(engines: Sequence[Replica]) -> int:
    return sum([await engine.num_generated() for engine in engines])


async def test_a_streamed_chat_comes_through(http: aiohttp.ClientSession) -> None:
    fields = {"model": "tiny", "messages": CHATS[0]["messages"], "max_tokens": 5, "stream": True, "ignore_eos": True}
    async with http.post("/v1/chat/completions", json=fields) as answer:
        raw = await answer.read()
    assert answer.status == 200
    assert raw.startswith(b"data: {") and raw.endswith(b"data: [DONE]\n\n")


async def test_a_list_of_prompts_is_merged_as_the_engine_would(http: aiohttp.ClientSession) -> None:
    prompts = [unique_prompt(seed, 40) for seed in (30, 31, 32)]
    async with http.post(
        "/v1/completions", json={"model": "tiny", "prompt": prompts, "n": 2, "max_tokens": 2}
    ) as answer:
        body = await answer.json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["usage"]["prompt_tokens"] == 120


async def test_what_the_engine_refuses_comes_back_in_its_words(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", json={"model": "tiny", "prompt": [7], "max_tokens": 100_000}) as answer:
        assert answer.status == 400
        assert "max_tokens" in json.dumps(await answer.json())


async def test_a_killed_replica_loses_no_other_request(vllm_pair: VllmPair) -> None:
    """Requests of the killed one that had no byte yet run on the other; those of the other never notice."""
    survivor, victim = vllm_pair.urls
    async with before(vllm_pair) as gateway, aiohttp.ClientSession(gateway.url) as http:
        try:
            answers = [asyncio.create_task(long_answer(http, unique_prompt(100 + i, 64))) for i in range(12)]
            replicas = gateway.serving.scheduler.snapshot
            await eventually(lambda: replicas().replicas[ReplicaId(victim)].num_requests > 0)
            await vllm_pair.kill(1)
            assert {await answer for answer in answers} == {survivor}
            assert await moved_away_from(http, victim) > 0
            await eventually(lambda: list(gateway.serving.replicas) == [survivor])
        finally:
            await vllm_pair.start(1)
        await eventually(lambda: victim in gateway.serving.replicas)


async def long_answer(http: aiohttp.ClientSession, prompt: list[int]) -> str:
    """The replica that gave a whole answer of many tokens."""
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 300, "ignore_eos": True}
    async with http.post("/v1/completions", json=fields) as answer:
        body = await answer.json()
        assert answer.status == 200 and body["usage"]["completion_tokens"] == 300, body
        return answer.headers["x-preble-replica"]


async def moved_away_from(http: aiohttp.ClientSession, replica: str) -> float:
    """How many requests the gateway has moved from a replica to another."""
    async with http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("preble_moves_total") and replica in line)
