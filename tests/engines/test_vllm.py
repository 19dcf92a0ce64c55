"""The vLLM client against two real replicas on the CPU."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from preble.core.types import BlockHash, namespace_of
from preble.engines import Engine, connect
from preble.engines.kv_sockets import KvEventEndpoints
from preble.engines.kv_wire import WireRemoved, WireStored
from preble.engines.vllm import VllmEngine
from preble.errors import EngineRefused, RequestError
from support.belief import Belief, believing, newest_message, raw_events
from support.relay import TcpRelay
from support.replicas import BLOCK_SIZE, KV_TOKENS, MAX_MODEL_LEN, MODEL_NAME, Replica, VllmPair, prompt_of
from support.waiting import eventually

LONG = 1900
"""Output tokens of a request that is still running, some seconds of work later, unless it was aborted."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture
async def replica(vllm_pair: VllmPair) -> AsyncIterator[Replica]:
    """The first replica, its cache empty."""
    async with aiohttp.ClientSession() as session:
        first = Replica(vllm_pair.urls[0], session)
        await first.reset_prefix_cache()
        # The engine announces the reset with its next batch only.
        await first.complete(prompt_of(0, 8))
        yield first


@pytest.fixture
async def engine(vllm_pair: VllmPair) -> AsyncIterator[Engine]:
    client = connect(vllm_pair.urls[0])
    yield client
    await client.close()


@pytest.fixture
async def endpoints(vllm_pair: VllmPair) -> AsyncIterator[KvEventEndpoints]:
    """As the engine itself tells them."""
    client = connect(vllm_pair.urls[0], "vllm")
    assert isinstance(client, VllmEngine)
    await client.probe()
    assert client.kv_event_endpoints is not None
    yield client.kv_event_endpoints
    await client.close()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL_NAME, "prompt": "def main():", "ignore_eos": True, **fields}).encode()


def chat_with_tools(**fields: Any) -> bytes:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    chat = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "1 + 1?"}], "tools": [tool]}
    return json.dumps({**chat, "tool_choice": "none", **fields}).encode()


async def read(engine: Engine, path: str, body: bytes) -> tuple[int, bytes]:
    async with engine.send(path, body, {}) as response:
        return response.status, b"".join([chunk async for chunk in response.chunks()])


async def test_the_engine_is_recognised_and_tells_its_configuration(engine: Engine) -> None:
    info = await engine.probe()
    assert (info.engine, info.models, info.adapters) == ("vllm", (MODEL_NAME,), ())
    assert (info.max_model_len, info.spec.max_prompt_tokens) == (MAX_MODEL_LEN, MAX_MODEL_LEN)
    assert (info.spec.kv_capacity_tokens, info.spec.block_size) == (KV_TOKENS, BLOCK_SIZE)
    assert info.spec.reports_events
    assert info.version == "0.32.0"


async def test_it_serves_as_a_plain_openai_server_too(vllm_pair: VllmPair) -> None:
    client = connect(vllm_pair.urls[1], "openai")
    info = await client.probe()
    await client.check_ready()
    assert (info.engine, info.models, info.max_model_len) == ("openai", (MODEL_NAME,), MAX_MODEL_LEN)
    assert not info.spec.reports_events
    assert client.kv_events() is None
    await client.close()


async def test_a_ready_engine_says_so(engine: Engine) -> None:
    await engine.probe()
    await engine.check_ready()


async def test_an_answer_comes_whole(engine: Engine) -> None:
    status, body = await read(engine, "/v1/completions", completion(max_tokens=5))
    assert status == 200
    assert json.loads(body)["usage"]["completion_tokens"] == 5


async def test_an_answer_streams(engine: Engine) -> None:
    status, body = await read(engine, "/v1/completions", completion(max_tokens=5, stream=True))
    assert status == 200
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


async def test_a_chat_with_tools_is_answered(engine: Engine) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "1 + 1?"}], "max_tokens": 2}
    status, answer = await read(
        engine, "/v1/chat/completions", json.dumps(body | {"tools": [tool], "tool_choice": "none"}).encode()
    )
    assert status == 200, answer


async def test_an_error_of_the_engine_is_passed_on_as_it_is(engine: Engine) -> None:
    status, body = await read(engine, "/v1/completions", completion(model="other"))
    assert status == 404
    assert "other" in json.loads(body)["error"]["message"]


async def test_leaving_a_stream_early_aborts_the_work(engine: Engine, replica: Replica) -> None:
    finished = await finished_by_length(replica)
    async with engine.send("/v1/completions", completion(max_tokens=LONG, stream=True), {}) as response:
        assert (await anext(response.chunks())).startswith(b"data: ")
    await eventually(lambda: is_idle(replica), "nothing runs any more")
    assert await finished_by_length(replica) == finished, "it was not simply run to its end"


async def test_cancelling_a_request_that_does_not_stream_aborts_the_work(engine: Engine, replica: Replica) -> None:
    finished = await finished_by_length(replica)
    task = asyncio.create_task(read(engine, "/v1/completions", completion(max_tokens=LONG)))
    await eventually(lambda: is_running(replica), "it runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: is_idle(replica), "nothing runs any more")
    assert await finished_by_length(replica) == finished, "it was not simply run to its end"


async def is_running(replica: Replica) -> bool:
    return await replica.num_running() > 0


async def is_idle(replica: Replica) -> bool:
    return await replica.num_running() == 0


async def finished_by_length(replica: Replica) -> float:
    return await replica.metric("vllm:request_success_total", finished_reason="length")


async def test_tokens_are_those_that_the_engine_computes(engine: Engine) -> None:
    await engine.probe()
    prompt = completion(prompt="import os\nprint(os.sep)", max_tokens=1, return_token_ids=True)
    tokens = await engine.tokenize(prompt)
    _, answer = await read(engine, "/v1/completions", prompt)
    assert tokens == json.loads(answer)["choices"][0]["prompt_token_ids"]


async def test_tokens_of_a_chat_are_those_that_the_engine_computes(engine: Engine) -> None:
    await engine.probe()
    body = chat_with_tools(max_tokens=1, return_token_ids=True)
    tokens = await engine.tokenize(body)
    _, answer = await read(engine, "/v1/chat/completions", body)
    assert tokens == json.loads(answer)["prompt_token_ids"]


async def test_a_body_that_cannot_be_tokenized_is_the_clients_fault(engine: Engine) -> None:
    with pytest.raises(RequestError):
        await engine.tokenize(b'{"prompt": 5}')


async def test_events_tell_what_is_cached_through_hits_and_forced_evictions(
    replica: Replica, endpoints: KvEventEndpoints
) -> None:
    system = prompt_of(1, 300)
    prompts = [system + prompt_of(100 + i, 60 + 17 * (i % 9)) for i in range(14)]
    prompts += [prompt_of(200 + i, 33 * (i + 1)) for i in range(12)]
    async with believing(endpoints) as belief:
        found = [await predicted_and_found(belief, endpoints, replica, prompt) for prompt in prompts + prompts]
        assert [predicted for predicted, _ in found] == [cached for _, cached in found]
        assert sum(cached for _, cached in found) > 3000, "there were hits"
        assert any(cached == 0 for _, cached in found[len(prompts) :]), "and evictions"
        assert belief.parent_missing == 0
        assert belief.stream.counters.starts_over == 1


async def predicted_and_found(
    belief: Belief, endpoints: KvEventEndpoints, replica: Replica, prompt: list[int], **more: Any
) -> tuple[int, int]:
    """Cached tokens of a prompt: as the events say, and as the engine then reports."""
    await belief.settled(endpoints)
    predicted = belief.usable_tokens(prompt, BLOCK_SIZE)
    return predicted, await replica.complete(prompt, **more)


async def test_generated_tokens_count_once_their_block_is_full(replica: Replica, endpoints: KvEventEndpoints) -> None:
    async with believing(endpoints) as belief:
        await replica.complete(prompt_of(2, 40), max_tokens=60)
        await belief.settled(endpoints)
        assert len(belief) == (40 + 60 - 1) // BLOCK_SIZE


async def test_a_block_with_several_copies_stays_until_the_last_one_is_gone(
    replica: Replica, endpoints: KvEventEndpoints
) -> None:
    """A prompt of whole blocks makes copies: its last token is always computed, so its last block is each time."""
    prompt = prompt_of(3, 6 * BLOCK_SIZE)
    async with believing(endpoints) as belief:
        since = await newest_message(endpoints) + 1
        for _ in range(4):
            await replica.complete(prompt)
        [last] = await stored_more_than_once(endpoints, since)
        for i in range(12):
            await replica.complete(prompt_of(300 + i, 10 * BLOCK_SIZE))
            # Using one of the copies keeps it, while the others get old and are evicted.
            predicted, cached = await predicted_and_found(belief, endpoints, replica, [*prompt, 100 + i])
            assert predicted == cached == len(prompt)
        assert last in await removed_hashes(endpoints, since), "a copy was evicted meanwhile"


async def stored_more_than_once(endpoints: KvEventEndpoints, since: int) -> set[BlockHash]:
    stored = Counter(
        block
        for event in await raw_events(endpoints, since)
        if isinstance(event, WireStored)
        for block in event.block_hashes
    )
    return {block for block, times in stored.items() if times > 1}


async def removed_hashes(endpoints: KvEventEndpoints, since: int) -> set[BlockHash]:
    events = await raw_events(endpoints, since)
    return {block for event in events if isinstance(event, WireRemoved) for block in event.block_hashes}


async def test_a_reset_of_the_cache_arrives_with_the_next_batch(replica: Replica, endpoints: KvEventEndpoints) -> None:
    prompt = prompt_of(5, 200)
    async with believing(endpoints) as belief:
        await replica.complete(prompt)
        await belief.settled(endpoints)
        assert belief.usable_tokens(prompt, BLOCK_SIZE) == 192
        clears = belief.clears
        await replica.reset_prefix_cache()
        assert await replica.complete(prompt_of(6, 100)) == 0
        await belief.settled(endpoints)
        assert (belief.clears, belief.usable_tokens(prompt, BLOCK_SIZE)) == (clears + 1, 0)
        assert belief.stream.counters.starts_over == 1, "the engine said so, it was not a guess"
        assert await replica.complete(prompt) == 0


async def test_a_late_joiner_believes_the_same(replica: Replica, endpoints: KvEventEndpoints) -> None:
    prompts = [prompt_of(400 + i, 290) for i in range(12)]
    async with believing(endpoints) as early:
        for prompt in prompts:
            await replica.complete(prompt)
        async with believing(endpoints) as late:
            await early.settled(endpoints)
            await late.settled(endpoints)
            expected = [early.usable_tokens(prompt, BLOCK_SIZE) for prompt in prompts]
            assert [late.usable_tokens(prompt, BLOCK_SIZE) for prompt in prompts] == expected
            assert 0 < sum(expected) < 288 * 12
            assert len(late) == len(early)


async def test_a_missed_stretch_of_events_is_made_up_for(replica: Replica, endpoints: KvEventEndpoints) -> None:
    before, missed = prompt_of(7, 200), [prompt_of(500 + i, 290) for i in range(8)]
    async with (
        TcpRelay(endpoints.endpoint) as relay,
        believing(KvEventEndpoints(relay.address, endpoints.replay, endpoints.topic)) as belief,
    ):
        await replica.complete(before)
        await belief.settled(endpoints)
        position = belief.stream.position
        await relay.cut()
        for prompt in missed:
            await replica.complete(prompt)
        assert belief.stream.position == position, "nothing came through"
        relay.mend()
        found = [
            await predicted_and_found(belief, endpoints, replica, prompt) for prompt in [*reversed(missed), before]
        ]
        assert [predicted for predicted, _ in found] == [cached for _, cached in found]
        assert 0 < sum(cached > 0 for _, cached in found) < len(found), "some were evicted meanwhile"
        assert belief.stream.counters.starts_over == 1, "what was missed was asked for, nothing had to be forgotten"


async def test_prompts_with_a_cache_salt_are_told_apart(engine: Engine, replica: Replica) -> None:
    await engine.probe()
    prompt = prompt_of(8, 100)
    await replica.complete(prompt, cache_salt="pepper")
    await replica.complete(prompt)
    events = engine.kv_events()
    assert events is not None
    namespaces = set()
    async for event in events:
        namespaces.add(getattr(event, "namespace", None))
        if namespaces >= {"", namespace_of(cache_salt="pepper")}:
            break


@pytest.mark.slow
async def test_a_killed_engine_is_noticed_and_its_successor_followed(vllm_pair: VllmPair) -> None:
    client = connect(vllm_pair.urls[1], "vllm")
    assert isinstance(client, VllmEngine)
    await client.probe()
    assert client.kv_event_endpoints is not None
    prompt = prompt_of(9, 200)
    async with aiohttp.ClientSession() as session, believing(client.kv_event_endpoints) as belief:
        replica = Replica(vllm_pair.urls[1], session)
        await replica.complete(prompt)
        await belief.settled(client.kv_event_endpoints)
        assert belief.usable_tokens(prompt, BLOCK_SIZE) == 192
        await vllm_pair.kill(1)
        with pytest.raises(EngineRefused):
            await client.check_ready()
        await vllm_pair.start(1)
        await client.check_ready()
        await eventually(lambda: len(belief) == 0, "the old blocks are forgotten", timeout_s=120.0)
        assert belief.stream.counters.starts_over == 2
        predicted, cached = await predicted_and_found(belief, client.kv_event_endpoints, replica, prompt)
        assert (predicted, cached) == (0, 0)
        predicted, cached = await predicted_and_found(belief, client.kv_event_endpoints, replica, prompt)
        assert predicted == cached == 192
    await client.close()
