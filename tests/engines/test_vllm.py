"""What only vLLM does, a real replica on the CPU; what every engine does: test_real_engines.py."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from preble.core.types import BlockHash
from preble.engines import Engine, connect
from preble.engines.kv_events.sockets import KvEventEndpoints
from preble.engines.kv_events.wire import WireRemoved, WireStored
from preble.errors import RequestError
from support.belief import believing, newest_message, predicted_and_found, raw_events
from support.questions import Replica, VllmReplica, asked, completion, prompt_of, read
from support.replicas import BLOCK_SIZE, MAX_MODEL_LEN, MODEL_NAME, TEST_TIMEOUT_S, VllmPair

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(TEST_TIMEOUT_S)]


@pytest.fixture
async def replica(vllm_pair: VllmPair) -> AsyncIterator[Replica]:
    """The first replica, with nothing in it."""
    async with asked(VllmReplica, vllm_pair.urls[0]) as first:
        yield first


def chat_with_tools(**fields: Any) -> bytes:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    chat = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "1 + 1?"}], "tools": [tool]}
    return json.dumps({**chat, "tool_choice": "none", **fields}).encode()


async def test_it_serves_as_a_plain_openai_server_too(vllm_pair: VllmPair) -> None:
    server = connect(vllm_pair.urls[1], "openai")
    found = await server.probe()
    client, info = found.engine, found.info
    await client.check_ready()
    assert (info.engine, info.models, info.max_model_len) == ("openai", (MODEL_NAME,), MAX_MODEL_LEN)
    assert not info.spec.reports_events
    await client.follow_kv_events(pytest.fail)
    await server.close()


async def test_a_chat_with_tools_is_answered(engine: Engine) -> None:
    status, answer = await read(engine, chat_with_tools(max_tokens=2), "/v1/chat/completions")
    assert status == 200, answer


async def test_an_answer_of_a_given_form_is_answered(engine: Engine) -> None:
    body = completion(max_tokens=8, ignore_eos=False, structured_outputs={"choice": ["yes", "no"]})
    status, answer = await read(engine, body)
    assert status == 200, answer
    assert json.loads(answer)["choices"][0]["text"] in ("yes", "no")


async def test_an_error_of_the_engine_is_passed_on_as_it_is(engine: Engine) -> None:
    status, body = await read(engine, completion(model="other"))
    assert status == 404
    assert "other" in json.loads(body)["error"]["message"]


async def test_tokens_are_those_that_the_engine_computes(engine: Engine) -> None:
    prompt = completion(prompt="import os\nprint(os.sep)", max_tokens=1, return_token_ids=True)
    tokens = await engine.tokenize(prompt)
    _, answer = await read(engine, prompt)
    assert tokens == json.loads(answer)["choices"][0]["prompt_token_ids"]


async def test_tokens_of_a_chat_are_those_that_the_engine_computes(engine: Engine) -> None:
    body = chat_with_tools(max_tokens=1, return_token_ids=True)
    tokens = await engine.tokenize(body)
    _, answer = await read(engine, body, "/v1/chat/completions")
    assert tokens == json.loads(answer)["prompt_token_ids"]


async def test_a_body_that_cannot_be_tokenized_is_the_clients_fault(engine: Engine) -> None:
    with pytest.raises(RequestError):
        await engine.tokenize(b'{"prompt": 5}')


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
        assert await replica.empties_cache()
        assert await replica.complete(prompt_of(6, 100)) == 0
        await belief.settled(endpoints)
        assert (belief.clears, belief.usable_tokens(prompt, BLOCK_SIZE)) == (clears + 1, 0)
        assert belief.stream.counters.starts_over == 1, "the engine said so, it was not a guess"
        assert await replica.complete(prompt) == 0
