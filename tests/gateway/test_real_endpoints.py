"""The engines' further endpoints through the gateway, before real vLLM and real SGLang."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from preble.config import ReplicaConfig
from preble.core.types import unpack_tokens
from preble.gateway.server import Gateway
from preble.prompts.endpoints import ENDPOINTS
from preble.prompts.endpoints.bodies import PromptLimits
from preble.prompts.tokens.tokenizer import PromptTokenizer
from support.gateways import gateway_before, idle
from support.replicas import TEST_TIMEOUT_S, TINY_MODEL, VllmPair
from support.waiting import eventually

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)
LONG = "import os\nfor name in sorted(os.environ):\n    print(name, len(name))\n" * 12
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer", "description": "where"}}}
TOOL_USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a cat"}]}
MESSAGES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": LONG}]},
    {"system": LONG, "messages": [{"role": "user", "content": [{"type": "text", "text": "é🙂"}]}]},
    {
        "system": [{"type": "text", "text": LONG}, {"type": "text", "text": "Be brief."}],
        "tools": [{"name": "look", "description": "Look.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "none"},
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, TOOL_USE]},
            {"role": "user", "content": [TOOL_RESULT, {"type": "text", "text": "And?"}]},
        ],
    },
]
FUNCTION = {"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA}
RESPONSES: list[dict[str, Any]] = [
    {"input": LONG},
    {"instructions": LONG, "input": [{"role": "user", "content": [{"type": "input_text", "text": "é🙂"}]}]},
    {
        "instructions": LONG,
        "tools": [FUNCTION],
        "tool_choice": "none",
        "input": [
            {"role": "user", "content": "Look."},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"role": "user", "content": "And?"},
        ],
    },
]
CASES = [("/v1/messages", body) for body in MESSAGES] + [("/v1/responses", body) for body in RESPONSES]
BLOCK = 32


@asynccontextmanager
async def before(urls: Sequence[str], **settings: Any) -> AsyncIterator[Gateway]:
    async with gateway_before(list(map(ReplicaConfig, urls)), **settings) as gateway:
        yield gateway
        await idle(gateway)


@pytest.fixture
async def http(vllm_pair: VllmPair) -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        before(vllm_pair.urls, tokenizer=str(TINY_MODEL)) as gateway,
        aiohttp.ClientSession(gateway.url) as session,
    ):
        yield session


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> tuple[Any, dict[str, str]]:
    async with http.post(path, json=body) as answer:
        content = await answer.read()
        assert answer.status == 200, content
        return json.loads(content), {name.lower(): value for name, value in answer.headers.items()}


@pytest.mark.vllm
@pytest.mark.parametrize(("path", "body"), CASES)
async def test_a_translated_body_has_the_engines_own_tokens(
    vllm_pair: VllmPair, path: str, body: dict[str, Any]
) -> None:
    """What the engine has computed for it, it finds cached when it gets our ids."""
    body = {"model": "tiny", "max_tokens": 1, "max_output_tokens": 1, **body, "cache_salt": f"{time.time_ns()}"}
    fields = ENDPOINTS[path].read(json.dumps(body).encode(), PromptLimits(8, 1e9))
    special = b',"add_special_tokens":true}' if fields.special_tokens_on_vllm else b"}"
    ours = list(unpack_tokens(PromptTokenizer(TINY_MODEL).chat(fields.chat[:-1] + special)))
    async with aiohttp.ClientSession(vllm_pair.urls[0]) as engine:
        said, _ = await post(engine, path, **body)
        counts = [count for name, count in said["usage"].items() if name.endswith("input_tokens")]
        assert sum(counts) == len(ours)
        again, _ = await post(
            engine, "/v1/completions", model="tiny", prompt=ours, max_tokens=1, cache_salt=body["cache_salt"]
        )
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(ours) - 1) // BLOCK * BLOCK


@pytest.mark.vllm
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/inference/v1/generate"])
async def test_a_repeated_prompt_is_found_where_it_was_computed(http: aiohttp.ClientSession, path: str) -> None:
    text = f"{time.time_ns()} {LONG}"
    ids = [8 + (time.time_ns() + i * 13) % 4000 for i in range(300)]
    body: dict[str, Any] = {
        "/v1/messages": {"messages": [{"role": "user", "content": text}], "max_tokens": 3},
        "/v1/responses": {"input": text, "max_output_tokens": 3},
        "/inference/v1/generate": {"token_ids": ids, "sampling_params": {"max_tokens": 3}},
    }[path] | {"model": "tiny"}
    _, first = await post(http, path, **body)
    _, again = await post(http, path, **body)
    assert again["x-preble-replica"] == first["x-preble-replica"] and int(again["x-preble-matched-tokens"]) >= 128
    async with http.post(path, json=body | {"stream": True}) as answer:
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        text = await answer.text()
    last = {"/v1/messages": "event: message_stop", "/v1/responses": "response.completed"}.get(path, "data: [DONE]")
    assert last in text.strip().split("\n\n")[-1]


@pytest.mark.vllm
async def test_tokens_are_counted_and_turned_back_here_as_the_engine_does(
    vllm_pair: VllmPair, http: aiohttp.ClientSession
) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "def f(x): # é🙂"},
        {"prompt": "a", "add_special_tokens": False},
        {"messages": [{"role": "user", "content": "Hi"}]},
    ]
    async with aiohttp.ClientSession(vllm_pair.urls[0]) as engine:
        for body in bodies:
            ours, headers = await post(http, "/tokenize", model="tiny", **body)
            theirs, _ = await post(engine, "/tokenize", model="tiny", **body)
            assert ours == theirs and "x-preble-replica" not in headers
            back, _ = await post(http, "/detokenize", model="tiny", tokens=ours["tokens"])
            assert back == (await post(engine, "/detokenize", model="tiny", tokens=ours["tokens"]))[0]
        shown, headers = await post(http, "/tokenize", model="tiny", prompt="a", return_token_strs=True)
        assert shown["token_strs"] and "x-preble-replica" in headers


@pytest.mark.vllm
async def test_output_has_the_structure_that_was_asked_for(http: aiohttp.ClientSession) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
    answer, _ = await post(http, "/v1/chat/completions", **chat, structured_outputs={"choice": ["a cat", "a dog"]})
    assert answer["choices"][0]["message"]["content"] in ("a cat", "a dog")
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"enum": ["a cat"]}}}
    answer, _ = await post(http, "/v1/chat/completions", **chat, response_format=form)
    assert json.loads(answer["choices"][0]["message"]["content"]) == "a cat"


@pytest.mark.sglang
async def test_sglangs_own_endpoint_is_placed_by_its_prompt(sglang_url: str) -> None:
    async with before([sglang_url]) as gateway, aiohttp.ClientSession(gateway.url) as http:
        body = {"text": f"{time.time_ns()} {LONG}", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        answer, _ = await post(http, "/generate", **body)
        assert answer["meta_info"]["completion_tokens"] == 3
        again, headers = await post(http, "/generate", **body)
        assert again["meta_info"]["cached_tokens"] > 100 and int(headers["x-preble-matched-tokens"]) > 100
        async with http.post("/generate", json=body | {"stream": True}) as streamed:
            assert (await streamed.text()).strip().endswith("data: [DONE]")
        await eventually(lambda: gateway.serving.num_in_flight == 0)
        [last] = gateway.serving.recent.latest(1)
        assert (last.outcome, last.output_tokens) == ("ok", 3) and (last.cached_tokens or 0) > 100


@pytest.mark.sglang
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_cached_tokens_of_sglangs_messages_are_known(sglang_url: str, stream: bool) -> None:
    async with before([sglang_url]) as gateway, aiohttp.ClientSession(gateway.url) as http:
        chat = [{"role": "user", "content": f"{time.time_ns()} {LONG}"}]
        body = {"model": "tiny", "messages": chat, "max_tokens": 12, "stream": stream}
        for _ in range(2):
            async with http.post("/v1/messages", json=body) as answer:
                text = await answer.text()
                assert answer.status == 200, text
        [told] = {int(found) for found in re.findall(r'"cache_read_input_tokens": ?(\d+)', text)}
        await eventually(lambda: gateway.serving.num_in_flight == 0)
        [last] = gateway.serving.recent.latest(1)
        assert last.cached_tokens == told > 100
