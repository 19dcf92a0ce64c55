"""The emulated replica over real sockets: answers, cache, aborts, bad input. Nothing here depends on its speed."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from preble.emulator import EmulatorConfig, EmulatorServer
from preble.errors import ConfigError
from preble.profiles import load_profile
from support.waiting import PATIENCE_S, eventually

BLOCK = 16
WORDS = "one two three four five six seven eight nine ten"
ENDLESS = 1_000_000


class Client:
    """One client of one emulated replica."""

    def __init__(self, http: aiohttp.ClientSession, server: EmulatorServer) -> None:
        self.http = http
        self.server = server

    async def get(self, path: str) -> Any:
        async with self.http.get(self.server.url + path) as answer:
            assert answer.status == 200
            return await answer.json()

    async def post(self, path: str, status: int = 200, **body: Any) -> Any:
        return await self.post_raw(path, json.dumps(body).encode(), status)

    async def post_raw(self, path: str, body: bytes, status: int = 200) -> Any:
        async with self.http.post(self.server.url + path, data=body) as answer:
            content = await answer.read()
            assert answer.status == status, content
            assert answer.headers["X-Preble-Emulated"] == "tiny-cpu"
            return json.loads(content)

    async def complete(self, prompt: Any, **more: Any) -> Any:
        return await self.post("/v1/completions", prompt=prompt, **more)

    async def stream(self, path: str, **body: Any) -> list[Any]:
        """The events of a streamed answer, `[DONE]` checked and left out."""
        async with self.http.post(self.server.url + path, json={**body, "stream": True}) as answer:
            assert answer.status == 200
            assert answer.content_type == "text/event-stream"
            lines = (await answer.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    async def metric(self, name: str) -> float:
        async with self.http.get(self.server.url + "/metrics") as answer:
            families = text_string_to_metric_families(await answer.text())
        [value] = [sample.value for family in families for sample in family.samples if sample.name == f"vllm:{name}"]
        return value


@asynccontextmanager
async def emulator(**changes: Any) -> AsyncIterator[Client]:
    config = EmulatorConfig(**({"profile": "tiny-cpu", "speed": 100.0, "kv_tokens": 4096} | changes))
    async with EmulatorServer(config) as server, aiohttp.ClientSession() as http:
        yield Client(http, server)


def cached_tokens(answer: Any) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


# --- answers ---


async def test_a_completion_has_its_length_and_says_that_it_is_emulated() -> None:
    async with emulator() as client:
        answer = await client.complete(WORDS, max_tokens=20, model="tiny-cpu")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny-cpu"
    assert answer["system_fingerprint"] == "preble-emulator/tiny-cpu"
    [choice] = answer["choices"]
    assert "emulated" in choice["text"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 10
    assert answer["usage"]["completion_tokens"] == 20
    assert answer["usage"]["total_tokens"] == 30


async def test_without_a_limit_a_completion_has_sixteen_tokens() -> None:
    async with emulator() as client:
        assert (await client.complete(WORDS))["usage"]["completion_tokens"] == 16


async def test_streamed_pieces_are_the_text_of_the_whole_answer() -> None:
    async with emulator() as client:
        whole = await client.complete(WORDS, max_tokens=12)
        events = await client.stream("/v1/completions", prompt=WORDS, max_tokens=12)
    assert len(events) == 12
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 11 + ["length"]
    assert len({event["id"] for event in events}) == 1


async def test_a_stream_ends_with_usage_where_it_is_asked_for() -> None:
    async with emulator() as client:
        events = await client.stream(
            "/v1/completions", prompt=WORDS, max_tokens=3, stream_options={"include_usage": True}
        )
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert all("usage" not in event for event in events[:-1])


async def test_a_chat_answer_has_a_message() -> None:
    async with emulator() as client:
        answer = await client.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=5
        )
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == 5


async def test_a_chat_stream_names_the_role_once_and_then_gives_the_content() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    async with emulator() as client:
        events = await client.stream("/v1/chat/completions", messages=messages, max_tokens=4)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(list(delta) == ["content"] for delta in deltas[1:])
    assert len(deltas) == 5
    assert events[0]["object"] == "chat.completion.chunk"


async def test_a_chat_without_a_limit_stops_by_itself() -> None:
    async with emulator(default_output_tokens=7) as client:
        answer = await client.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("prompt", "num_prompts", "num_tokens"),
    [(WORDS, 1, 10), ([1, 2, 3], 1, 3), ([WORDS, "one"], 2, 11), ([[1, 2], [3, 4, 5], [6]], 3, 6)],
)
async def test_a_prompt_is_text_or_ids_or_a_list_of_either(prompt: Any, num_prompts: int, num_tokens: int) -> None:
    async with emulator() as client:
        answer = await client.complete(prompt, max_tokens=2, n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * num_prompts))
    assert answer["usage"]["prompt_tokens"] == num_tokens
    assert answer["usage"]["completion_tokens"] == 4 * num_prompts


async def test_several_choices_of_one_prompt_differ() -> None:
    async with emulator() as client:
        answer = await client.complete(WORDS, max_tokens=3, n=3)
        events = await client.stream("/v1/completions", prompt=WORDS, max_tokens=3, n=3)
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for event in events:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == texts


async def test_the_callers_request_id_is_in_the_answers_id() -> None:
    async with emulator() as client:
        headers = {"X-Request-Id": "mine"}
        async with client.http.post(
            client.server.url + "/v1/completions", json={"prompt": "a"}, headers=headers
        ) as answer:
            assert (await answer.json())["id"] == "cmpl-mine"


# --- the prefix cache ---


@pytest.mark.parametrize(("num_tokens", "expected"), [(100, 96), (64, 48), (15, 0)])
async def test_the_same_prompt_again_reports_its_full_blocks_as_cached(num_tokens: int, expected: int) -> None:
    async with emulator() as client:
        first = await client.complete(list(range(num_tokens)), max_tokens=1)
        second = await client.complete(list(range(num_tokens)), max_tokens=1)
        assert (cached_tokens(first), cached_tokens(second)) == (0, expected)
        assert await client.metric("prefix_cache_hits_total") == expected
        assert await client.metric("prefix_cache_queries_total") == 2 * num_tokens


async def test_the_next_turn_of_a_conversation_finds_the_last_answer_cached() -> None:
    question = {"role": "user", "content": " ".join(WORDS for _ in range(5))}
    async with emulator() as client:
        first = await client.post("/v1/chat/completions", messages=[question], max_tokens=40)
        messages = [question, first["choices"][0]["message"], {"role": "user", "content": "And now?"}]
        second = await client.post("/v1/chat/completions", messages=messages, max_tokens=1)
    computed = first["usage"]["total_tokens"] - 1
    assert cached_tokens(second) == computed // BLOCK * BLOCK


async def test_a_salt_keeps_prompts_apart() -> None:
    async with emulator() as client:
        await client.complete(list(range(64)), max_tokens=1)
        other = await client.complete(list(range(64)), max_tokens=1, cache_salt="mine")
        same = await client.complete(list(range(64)), max_tokens=1, cache_salt="mine")
    assert (cached_tokens(other), cached_tokens(same)) == (0, 48)


async def test_a_full_cache_forgets_the_oldest_prompt() -> None:
    async with emulator(kv_tokens=10 * BLOCK) as client:
        for start in (0, 1000, 2000):
            await client.complete(list(range(start, start + 4 * BLOCK)), max_tokens=1)
        newest = await client.complete(list(range(2000, 2000 + 4 * BLOCK)), max_tokens=1)
        oldest = await client.complete(list(range(4 * BLOCK)), max_tokens=1)
    assert cached_tokens(newest) == 3 * BLOCK
    assert cached_tokens(oldest) < 3 * BLOCK


async def test_reset_forgets_everything() -> None:
    async with emulator() as client:
        await client.complete(list(range(64)), max_tokens=1)
        assert await client.post("/reset_prefix_cache") == {"success": True}
        assert cached_tokens(await client.complete(list(range(64)), max_tokens=1)) == 0


async def test_tokenize_gives_the_ids_that_a_prompt_has() -> None:
    text = " ".join(WORDS for _ in range(10))
    async with emulator() as client:
        answer = await client.post("/tokenize", prompt=text)
        assert answer["count"] == len(answer["tokens"]) == 100
        assert answer["max_model_len"] == 4096
        await client.complete(text, max_tokens=1)
        assert cached_tokens(await client.complete(answer["tokens"], max_tokens=1)) == 96


async def test_tokenize_gives_the_ids_that_a_chat_has() -> None:
    messages = [{"role": "system", "content": WORDS * 5}, {"role": "user", "content": "Hi"}]
    async with emulator() as client:
        answer = await client.post("/tokenize", messages=messages)
        chat = await client.post("/v1/chat/completions", messages=messages, max_tokens=1)
        assert answer["count"] == chat["usage"]["prompt_tokens"]
        again = await client.complete(answer["tokens"], max_tokens=1)
    assert cached_tokens(again) == (answer["count"] - 1) // BLOCK * BLOCK


# --- aborts ---


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_its_blocks(stream: bool) -> None:
    async with emulator(kv_tokens=2 * ENDLESS, speed=1.0) as client:
        engine = client.server.engine
        body = {"prompt": list(range(100)), "max_tokens": ENDLESS, "stream": stream, "n": 2}
        request = asyncio.create_task(client.http.post(client.server.url + "/v1/completions", json=body))
        await eventually(lambda: engine.scheduler.num_running == 2)
        if stream:
            (await request).close()
        else:
            request.cancel()
        await eventually(lambda: engine.scheduler.num_running == 0)
        assert engine.kv_cache_usage == 0
        assert await client.metric("num_requests_running") == 0


async def test_a_waiting_client_that_goes_away_leaves_the_queue() -> None:
    async with emulator(kv_tokens=2 * ENDLESS, speed=1.0, max_running=1) as client:
        engine = client.server.engine
        body = {"prompt": [1], "max_tokens": ENDLESS}
        url = client.server.url + "/v1/completions"
        running = asyncio.create_task(client.http.post(url, json=body))
        await eventually(lambda: engine.scheduler.num_running == 1)
        waiting = asyncio.create_task(client.http.post(url, json=body))
        await eventually(lambda: engine.scheduler.num_waiting == 1)
        waiting.cancel()
        await eventually(lambda: engine.scheduler.num_waiting == 0)
        assert engine.scheduler.num_running == 1
        running.cancel()
        await eventually(lambda: engine.scheduler.num_running == 0)


async def test_other_requests_go_on_when_a_client_goes_away() -> None:
    async with emulator(kv_tokens=2 * ENDLESS, speed=1.0) as client:
        engine = client.server.engine
        url = client.server.url + "/v1/completions"
        body = {"prompt": [1], "max_tokens": ENDLESS, "stream": True}
        gone = asyncio.create_task(client.http.post(url, json=body))
        async with client.http.post(url, json=body) as other:
            await eventually(lambda: engine.scheduler.num_running == 2)
            (await gone).close()
            await eventually(lambda: engine.scheduler.num_running == 1)
            for _ in range(30):
                assert (await other.content.readuntil(b"\n\n")).startswith(b"data: {")
        await eventually(lambda: engine.scheduler.num_running == 0)


async def test_more_requests_than_fit_are_all_answered() -> None:
    """Five at once have no room: the last tokens of three are more than there is."""
    async with emulator(kv_tokens=20 * BLOCK, max_running=8) as client:
        prompts = [list(range(100 * i, 100 * i + 40)) for i in range(20)]
        fives = [prompts[i : i + 5] for i in range(0, 20, 5)]
        answers = await asyncio.gather(*(client.complete(five, max_tokens=60) for five in fives))
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [5 * 60] * 4
        assert await client.metric("num_preemptions_total") > 0
        assert client.server.engine.kv_cache_usage == 0


# --- bad input ---


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"{", None, "not valid JSON"),
        (b"\xff", None, "not valid JSON"),
        (b"[]", None, "Expected `object`"),
        (b"{}", None, "missing required field `prompt`"),
        (b'{"prompt": 5}', "prompt", "Expected `str`"),
        (b'{"prompt": []}', "prompt", "empty list"),
        (b'{"prompt": [1, "a"]}', "prompt[1]", "Expected `int`"),
        (b'{"prompt": [[1], ["a"]]}', "prompt[0]", "Expected `int`"),
        (b'{"prompt": [-1]}', "prompt[0]", ">= 0"),
        (b'{"prompt": ""}', None, "at least 1 prompt"),
        (b'{"prompt": [[1], []]}', "prompt", "empty list"),
        (b'{"prompt": "a", "max_tokens": "many"}', "max_tokens", "Expected `int | null`"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens", ">= 1"),
        (b'{"prompt": "a", "n": 0}', "n", ">= 1"),
        (b'{"prompt": "a", "echo": true}', "echo", "echo is not emulated"),
        (b'{"prompt": "a", "stream_options": {"include_usage": true}}', "stream_options", "stream=true"),
    ],
)
async def test_a_wrong_body_is_answered_with_400(body: bytes, param: str | None, message: str) -> None:
    async with emulator() as client:
        error = (await client.post_raw("/v1/completions", body, status=400))["error"]
        assert message in error["message"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert client.server.engine.scheduler.num_running + client.server.engine.scheduler.num_waiting == 0
        await client.complete("still alive", max_tokens=1)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_over_the_context_is_answered_with_400(stream: bool) -> None:
    async with emulator(max_model_len=100) as client:
        await client.complete(list(range(98)), max_tokens=2)
        answer = await client.post(
            "/v1/completions", status=400, prompt=[[1], list(range(99))], max_tokens=2, stream=stream
        )
        assert answer["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 100 tokens" in answer["error"]["message"]
        assert client.server.engine.scheduler.num_running + client.server.engine.scheduler.num_waiting == 0


async def test_an_unknown_model_is_answered_with_404() -> None:
    async with emulator(model="served") as client:
        answer = await client.post("/v1/completions", status=404, model="other", prompt="a")
        assert answer["error"]["code"] == "model_not_found"
        assert "'served'" in answer["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": [{"content": "Hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        {"messages": "Hi"},
    ],
)
async def test_wrong_messages_are_answered_with_400(body: dict[str, Any]) -> None:
    async with emulator() as client:
        await client.post("/v1/chat/completions", status=400, **body)
        await client.post("/tokenize", status=400, **body)


async def test_paths_and_methods_that_are_not_served_are_refused() -> None:
    async with emulator() as client:
        assert (await client.post("/v1/rerank", status=404))["error"]["code"] == "not_found"
        assert (await client.post("/health", status=405))["error"]["code"] == "method_not_allowed"


# --- what it says of itself ---


async def test_it_describes_its_model_and_cache_as_vllm_does() -> None:
    async with emulator(kv_tokens=1000) as client:
        [card] = (await client.get("/v1/models"))["data"]
        assert (card["id"], card["max_model_len"]) == ("tiny-cpu", 62 * BLOCK)
        assert "emulator" in (await client.get("/version"))["version"]
        async with client.http.get(client.server.url + "/metrics") as answer:
            families = {family.name: family for family in text_string_to_metric_families(await answer.text())}
    [info] = families["vllm:cache_config_info"].samples
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"]) == ("16", "62")
    assert {"vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:generation_tokens"} <= families.keys()


async def test_a_port_in_use_is_refused() -> None:
    async with emulator() as client:
        config = msgspec.structs.replace(client.server.config, port=client.server.port)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{client.server.port}"):
            await EmulatorServer(config).__aenter__()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_tokens": 16}, "kv_tokens must be at least two blocks of 16, got 16"),
        ({"speed": 0}, "speed must be more than 0"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"port": 70000}, "port must be from 0 to 65535"),
        ({"max_running": 3000}, r"max_batch_tokens \(2048\) must be at least max_running \(3000\)"),
        ({"max_model_len": 1}, "max_model_len must be at least 2"),
    ],
)
def test_a_wrong_configuration_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmulatorConfig(**({"profile": "tiny-cpu"} | change))


def test_a_profile_whose_cache_holds_nothing_is_refused(tmp_path: Path) -> None:
    fields = asdict(load_profile("tiny-cpu")) | {"kv_capacity_tokens": 8}
    path = tmp_path / "small.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ConfigError, match="less than two blocks"):
        EmulatorServer(EmulatorConfig(profile=str(path)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_process_says_where_it_listens_and_ends_cleanly_on_a_signal(number: signal.Signals) -> None:
    code = "from preble.emulator import *; run(EmulatorConfig(profile='tiny-cpu', events_port=0))"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode().strip()
            assert line.startswith("preble emulate: listening on http://127.0.0.1:")
            async with aiohttp.ClientSession() as http, http.get(line.split()[-1] + "/health") as answer:
                assert answer.status == 200
            process.send_signal(number)
            rest, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, rest, stderr) == (0, b"", b"")
