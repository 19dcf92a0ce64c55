"""What holds for every real engine behind its client: answers, aborts, and KV events that tell what it caches."""

from __future__ import annotations

import asyncio
import json

import pytest

from engines.conftest import OneOf
from preble.core.types import namespace_of
from preble.engines import Engine, connect
from preble.engines.kv_events.sockets import KvEventEndpoints
from preble.errors import EngineGone, EngineRefused
from support.belief import believing, predicted_and_found
from support.kv_changes import changes_of
from support.questions import Replica, completion, prompt_of, read
from support.relay import TcpRelay
from support.replicas import KV_TOKENS, MAX_MODEL_LEN, MODEL_NAME, TEST_TIMEOUT_S
from support.waiting import eventually

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

LONG = 1900
"""Output tokens of a request that is still running, some seconds of work later, unless it was aborted."""

VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23"}


async def test_the_engine_is_recognised_and_reports_its_configuration(replica: Replica) -> None:
    client = connect(replica.url)
    info = (await client.probe()).info
    await client.close()
    assert (info.engine, info.models, info.adapters) == (replica.engine, (MODEL_NAME,), ())
    assert (info.max_model_len, info.spec.max_prompt_tokens) == (MAX_MODEL_LEN, MAX_MODEL_LEN)
    assert (info.spec.kv_capacity_tokens, info.spec.block_size) == (KV_TOKENS, replica.block_size)
    assert info.spec.reports_events
    assert info.version == VERSIONS[replica.engine]


async def test_a_ready_engine_says_so(engine: Engine) -> None:
    await engine.check_ready()


async def test_an_answer_comes_whole(engine: Engine) -> None:
    status, body = await read(engine, completion(max_tokens=5))
    assert status == 200
    assert json.loads(body)["usage"]["completion_tokens"] == 5


async def test_an_answer_streams(engine: Engine) -> None:
    status, body = await read(engine, completion(max_tokens=5, stream=True))
    assert status == 200
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


async def test_an_engine_counts_what_it_generated(replica: Replica) -> None:
    """By that count tests see whether a request was aborted."""
    before = await replica.num_generated()
    await replica.complete(prompt_of(10, 8), max_tokens=20)

    async def is_counted() -> bool:
        return await replica.num_generated() >= before + 20

    await eventually(is_counted, "it is counted")


async def test_leaving_a_stream_early_aborts_the_work(engine: Engine, replica: Replica) -> None:
    generated = await replica.num_generated()
    async with engine.send("/v1/completions", completion(max_tokens=LONG, stream=True), {}) as response:
        assert (await anext(response.chunks())).startswith(b"data: ")
    await replica.idle()
    assert await replica.num_generated() < generated + LONG, "it did not run to its end"


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_the_end_aborts_the_work(engine: Engine, replica: Replica, stream: bool) -> None:
    generated = await replica.num_generated()
    work = asyncio.create_task(read(engine, completion(max_tokens=LONG, stream=stream)))
    await eventually(lambda: replica.runs(1), "it runs")
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await replica.idle()
    assert await replica.num_generated() < generated + LONG, "it did not run to its end"


async def test_events_say_what_is_cached_through_hits_and_forced_evictions(
    replica: Replica, endpoints: KvEventEndpoints
) -> None:
    system = prompt_of(1, 300)
    prompts = [system + prompt_of(100 + i, 60 + 17 * (i % 9)) for i in range(14)]
    prompts += [prompt_of(200 + i, 33 * (i + 1)) for i in range(12)]
    async with believing(endpoints) as belief:
        found = [await predicted_and_found(belief, endpoints, replica, prompt, 12) for prompt in prompts + prompts]
        assert [predicted for predicted, _ in found] == [cached for _, cached in found]
        assert sum(cached for _, cached in found) > 3000, "there were hits"
        assert any(cached == 0 for _, cached in found[len(prompts) :]), "and evictions"
        assert len(belief) * replica.block_size <= KV_TOKENS, "which were reported"
        assert belief.parent_missing == 0
        assert belief.stream.counters.starts_over == 1


async def test_generated_tokens_count_once_their_block_is_full(replica: Replica, endpoints: KvEventEndpoints) -> None:
    async with believing(endpoints) as belief:
        await replica.complete(prompt_of(2, 40), max_tokens=60)
        await belief.settled(endpoints)
        assert len(belief) == (40 + 60 - 1) // replica.block_size


async def test_a_late_joiner_believes_the_same(replica: Replica, endpoints: KvEventEndpoints) -> None:
    prompts = [prompt_of(400 + i, 290) for i in range(12)]
    async with believing(endpoints) as early:
        for prompt in prompts:
            await replica.complete(prompt)
        async with believing(endpoints) as late:
            await early.settled(endpoints)
            await late.settled(endpoints)
            expected = [early.usable_tokens(prompt, replica.block_size) for prompt in prompts]
            assert [late.usable_tokens(prompt, replica.block_size) for prompt in prompts] == expected
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


async def test_prompts_with_a_cache_salt_are_distinguished(engine: Engine, replica: Replica) -> None:
    prompt = prompt_of(8, 100)
    await replica.complete(prompt, cache_salt="pepper")
    await replica.complete(prompt)
    namespaces = set()
    async for event in changes_of(engine.follow_kv_events):
        namespaces.add(getattr(event, "namespace", None))
        if namespaces >= {"", namespace_of(cache_salt="pepper")}:
            break


@pytest.mark.slow
async def test_a_killed_engine_is_noticed_and_its_successor_followed(
    one: OneOf, engine: Engine, endpoints: KvEventEndpoints, replica: Replica
) -> None:
    prompt = prompt_of(9, 200)
    async with believing(endpoints) as belief:
        await replica.complete(prompt)
        await belief.settled(endpoints)
        assert belief.usable_tokens(prompt, replica.block_size) == 192
        await one.replicas.kill(one.index)
        with pytest.raises((EngineRefused, EngineGone)):
            await engine.check_ready()
        await one.replicas.start(one.index)
        await engine.check_ready()
        await eventually(lambda: len(belief) == 0, "the old blocks are forgotten")
        assert belief.stream.counters.starts_over == 2
        assert await predicted_and_found(belief, endpoints, replica, prompt) == (0, 0)
        assert await predicted_and_found(belief, endpoints, replica, prompt) == (192, 192)
