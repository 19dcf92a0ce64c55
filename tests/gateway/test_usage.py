"""What a client reads of its tokens is what the replicas that answered it counted: once each, through lists, streams
and retries."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from gateway.conftest import Serve, Served
from gateway.fakes import Behaviour, FakeReplica, die_before, die_midway, replicas, send_event, started_stream, status
from preble.config import AuthConfig
from support.waiting import eventually

DETAILS = {"cached_tokens": 4, "created_cache_tokens": 3, "multimodal_tokens": None}
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12, "prompt_tokens_details": DETAILS}
"""As vLLM 0.32.0 reports it."""
AUTH = AuthConfig(api_keys=("k",), admin_keys=("root",))
OTHER_PATHS = ("/v1/messages", "/v1/responses", "/generate")
MESSAGE_USAGE = {
    "input_tokens": 2,
    "cache_read_input_tokens": 4,
    "cache_creation_input_tokens": 3,
    "output_tokens": 3,
}


async def completion(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    choices = [{"index": 0, "text": "a"}]
    if not body.get("stream"):
        return web.json_response({"id": "engine", "choices": choices, "usage": USAGE})
    response = await started_stream(request)
    await send_event(response, {"id": "engine", "choices": choices, "usage": None})
    await send_event(response, {"id": "engine", "choices": [], "usage": USAGE})
    await response.write(b"data: [DONE]\n\n")
    return response


@dataclass(frozen=True)
class Counted:
    """How an endpoint reports 9 prompt tokens, of which 4 were cached, and 3 of the answer.

    `whole`: the answer. `events`: the stream's, by name or None where it gives none; the first one comes before the
    prefill is over where `waits`.
    """

    path: str
    body: dict[str, Any]
    whole: dict[str, Any]
    events: tuple[tuple[str | None, dict[str, Any]], ...]
    waits: bool = False

    async def __call__(self, replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return web.json_response(self.whole)
        response = await started_stream(request)
        for name, data in self.events:
            await self._send(response, name, data)
        if self.events[-1][0] is None:
            await response.write(b"data: [DONE]\n\n")
        return response

    async def break_early(self, replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """The connection breaks after the first event of a stream, and before any byte of a whole answer."""
        if not body.get("stream") or not self.waits:
            return await die_before(replica, request, body)
        response = await started_stream(request)
        await self._send(response, *self.events[0])
        assert request.transport is not None
        request.transport.close()
        return response

    async def _send(self, response: web.StreamResponse, name: str | None, data: dict[str, Any]) -> None:
        if name is not None:
            await response.write(f"event: {name}\n".encode())
        await send_event(response, data if name is None else {"type": name, **data})


CHAT = {"messages": [{"role": "user", "content": "hello"}]}
INPUT_USAGE = {
    "input_tokens": 9,
    "input_tokens_details": {"cached_tokens": 4},
    "output_tokens": 3,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 12,
}
META = {"prompt_tokens": 9, "completion_tokens": 3, "cached_tokens": 4}
BLOCK = ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})
CASES = {
    "chat": Counted(
        "/v1/chat/completions",
        CHAT | {"stream_options": {"include_usage": True}},
        {"choices": [{"index": 0, "message": {"content": "a"}}], "usage": USAGE},
        ((None, {"choices": [{"index": 0, "delta": {"content": "a"}}]}), (None, {"choices": [], "usage": USAGE})),
    ),
    "responses": Counted(
        "/v1/responses",
        {"input": "hello"},
        {"id": "resp_1", "output": [], "usage": INPUT_USAGE},
        (
            ("response.created", {"response": {"id": "resp_1", "usage": None}}),
            ("response.output_item.added", {"item": {}}),
            ("response.completed", {"response": {"id": "resp_1", "output": [], "usage": INPUT_USAGE}}),
        ),
        waits=True,
    ),
    "messages of vLLM": Counted(
        "/v1/messages",
        CHAT | {"max_tokens": 3},
        {"type": "message", "content": [], "usage": MESSAGE_USAGE},
        (
            ("message_start", {"message": {"usage": {"input_tokens": 0, "output_tokens": 0}}}),
            BLOCK,
            ("message_delta", {"delta": {}, "usage": MESSAGE_USAGE}),
            ("message_stop", {}),
        ),
        waits=True,
    ),
    "messages of SGLang": Counted(
        "/v1/messages",
        CHAT | {"max_tokens": 3},
        {
            "type": "message",
            "content": [],
            "usage": {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 3},
        },
        (
            (
                "message_start",
                {"message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 0}}},
            ),
            BLOCK,
            *[("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": "a"}})] * 9,
            ("message_delta", {"delta": {}, "usage": {"output_tokens": 3}}),
            ("message_stop", {}),
        ),
        waits=True,
    ),
    "generate": Counted(
        "/generate",
        {"text": "hello"},
        {"text": "abc", "meta_info": META},
        (
            (None, {"text": "a", "meta_info": META | {"completion_tokens": 1}}),
            (None, {"text": "abc", "meta_info": META}),
        ),
    ),
    "generate a list": Counted(
        "/generate",
        {"text": ["hello", "goodbye"]},
        [
            {"text": "ab", "meta_info": META | {"completion_tokens": 2}},
            {"text": "c", "meta_info": META | {"completion_tokens": 1, "cached_tokens": 0}},
        ],
        (
            (None, {"text": "a", "index": 0, "meta_info": META | {"completion_tokens": 1}}),
            (None, {"text": "ab", "index": 0, "meta_info": META | {"completion_tokens": 2}}),
            (None, {"text": "c", "index": 1, "meta_info": META | {"completion_tokens": 1, "cached_tokens": 0}}),
        ),
    ),
}


async def usage_of(gateway: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The usage that the client reads; of a stream the last one."""
    async with gateway.http.post(path, json={"model": "tiny", **body}) as answer:
        text = await answer.read()
        assert answer.status == 200, text
    if not body.get("stream"):
        usage: dict[str, Any] = json.loads(text)["usage"]
        return usage
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith(b"data: {")]
    [*_, last] = [event["usage"] for event in events if event.get("usage")]
    return last


def counts(usage: dict[str, Any]) -> dict[str, int]:
    return {name: count for name, count in (usage | usage["prompt_tokens_details"]).items() if isinstance(count, int)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", [status(500), die_before, die_midway], ids=["500", "before", "midway"])
async def test_each_prompt_is_counted_once_however_often_it_was_tried(
    serve: Serve, failure: Behaviour, stream: bool
) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with replicas(2) as fakes, serve(fakes) as gateway:
        for prompt in ("a", ["b", "c"], ["d", "e"]):
            for fake in fakes:
                fake.script.extend([completion] * 4)
            fakes[0].script.appendleft(failure)
            usage = await usage_of(gateway, "/v1/completions", {"prompt": prompt, **fields})
            assert counts(usage) == {name: len(prompt) * count for name, count in counts(USAGE).items()}
            fakes[0].script.clear()
            fakes[1].script.clear()
        assert sum(len(fake.requests) for fake in fakes) > 5, "some were tried twice"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fails", [None, "500", "midway", "early"])
@pytest.mark.parametrize("case", CASES)
async def test_tokens_are_those_of_the_replica_that_answered_and_a_key_pays_for_them_once(
    serve: Serve, case: str, fails: str | None, stream: bool
) -> None:
    counted = CASES[case]
    failure = {"500": status(500), "midway": die_midway, "early": counted.break_early}
    body = {"model": "tiny", "stream": stream, **counted.body}
    async with replicas(2, paths=OTHER_PATHS) as fakes, serve(fakes, auth=AUTH) as gateway:
        for fake in fakes:
            fake.script.extend([counted] * 4)
        if fails is not None:
            fakes[0].script.appendleft(failure[fails])
        for _ in range(2):
            async with gateway.http.post(counted.path, json=body, headers={"Authorization": "Bearer k"}) as answer:
                text = await answer.read()
                assert answer.status == 200, text
            if stream:
                sent = [json.dumps(data if name is None else {"type": name, **data}) for name, data in counted.events]
                read = [line[6:] for line in text.decode().splitlines() if line.startswith("data: {")]
                assert read == sent, "what the client reads are the replica's counts"
            else:
                assert json.loads(text) == counted.whole
        assert sum(len(fake.requests) for fake in fakes) == 2 + (fails is not None)

        def seen() -> list[tuple[int, int | None]]:
            ended = [one for one in gateway.gateway.serving.recent.latest(3) if one.outcome == "ok"]
            return [(one.output_tokens, one.cached_tokens) for one in ended]

        knows_cached = not stream or case != "generate a list"
        await eventually(lambda: seen() == [(3, 4 if knows_cached else None)] * 2)
        metrics = await gateway.metrics("root")
        prompt_tokens = sum(
            one.num_prompt_tokens for one in gateway.gateway.serving.recent.latest(3) if one.outcome == "ok"
        )
        assert f'kind="prompt"}} {prompt_tokens:.1f}' in metrics
        assert 'kind="output"} 6.0' in metrics
        assert f'kind="cached"}} {8.0 if knows_cached else 0.0}' in metrics
