"""What a client reads of its tokens is what the replicas that answered it counted: once each, through lists, streams
and retries."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from gateway.conftest import Serve, Served
from gateway.fakes import Behaviour, FakeReplica, die_before, die_midway, replicas, send_event, started_stream, status
from support.waiting import eventually

DETAILS = {"cached_tokens": 4, "created_cache_tokens": 3, "multimodal_tokens": None}
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12, "prompt_tokens_details": DETAILS}
"""As vLLM 0.32.0 reports it."""
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


async def message(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As vLLM's: a stream tells the counts at its end."""
    if not body.get("stream"):
        return web.json_response({"type": "message", "content": [], "usage": MESSAGE_USAGE})
    response = await started_stream(request)
    none_yet = {"input_tokens": 0, "output_tokens": 0}
    await send_event(response, {"type": "message_start", "message": {"usage": none_yet}})
    await send_event(response, {"type": "message_delta", "delta": {}, "usage": MESSAGE_USAGE})
    await send_event(response, {"type": "message_stop"})
    return response


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


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_counts_of_cached_tokens_are_those_of_the_replica_that_answered(
    serve: Serve, stream: bool
) -> None:
    async with replicas(2, paths=("/v1/messages",)) as fakes, serve(fakes) as gateway:
        fakes[0].script.extend([status(500), message])
        fakes[1].script.extend([message, message])
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "stream": stream}
        for _ in range(2):
            assert await usage_of(gateway, "/v1/messages", body) == MESSAGE_USAGE
        await eventually(lambda: [one.cached_tokens for one in gateway.gateway.serving.recent.latest(1)] == [4])
