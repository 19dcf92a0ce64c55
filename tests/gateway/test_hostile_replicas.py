"""Replicas that lie about what they did, or whose streams are none."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from gateway.conftest import Serve
from gateway.fakes import Behaviour, FakeReplica, replicas, rubbish, send_event, started_stream, status
from preble.config import HealthConfig, LimitsConfig
from preble.errors import EngineProtocolError
from preble.gateway.http.events import EventSplitter
from preble.prompts.endpoints.errors import ErrorStyle, in_style
from support.waiting import eventually

_COUNTED = {"completion_tokens": "output_tokens", "cached_tokens": "cached_tokens"}
SAID = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def reporting(usage: dict[str, Any]) -> Behaviour:
    """Answers with this usage, whatever was asked for."""

    async def behave(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        choices = [{"index": 0, "text": "a"}]
        if not body.get("stream"):
            return web.json_response({"id": "engine", "choices": choices, "usage": usage})
        response = await started_stream(request)
        await send_event(response, {"id": "engine", "choices": choices})
        await send_event(response, {"id": "engine", "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    return behave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello", ["hello", "again"]])
@pytest.mark.parametrize("count", [-1, 10**30])
@pytest.mark.parametrize("field", ["completion_tokens", "cached_tokens"])
async def test_a_count_of_tokens_that_cannot_be_counts_for_nothing(
    serve: Serve, field: str, count: int, prompt: Any, stream: bool
) -> None:
    usage = {**SAID, **({"prompt_tokens_details": {field: count}} if field == "cached_tokens" else {field: count})}
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script.extend([reporting(usage)] * 2)
        async with gateway.http.post("/v1/completions", json={"prompt": prompt, "stream": stream}) as answer:
            text = await answer.text()
        assert answer.status == 200
        assert "error" not in text
        await gateway.idle()
        metrics = await gateway.metrics()
        counted = [line for line in metrics.splitlines() if line.startswith(f"preble_{_COUNTED[field]}_total")]
        assert [float(line.split()[-1]) < 10 for line in counted] == [True]


async def test_streams_without_an_event_make_no_answer_to_a_list(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script.extend([rubbish(b"\n\n", "text/event-stream")] * 2)
        code, body, _ = await gateway.complete(prompt=["a", "b"], stream=True)
        assert (code, body["error"]["code"]) == (502, "engine_protocol_error")


async def pinging(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Stream what begins no answer, until the gateway leaves."""
    del replica, body
    response = await started_stream(request)
    with suppress(ConnectionError):
        while True:
            await response.write(b": " + bytes(4096).hex().encode() + b"\n\n")
            await asyncio.sleep(0)  # a write by itself lets nobody else run
    return response


async def test_a_stream_that_never_begins_is_given_up_by_what_it_takes(serve: Serve) -> None:
    limits = LimitsConfig(max_answer_bytes=100_000)
    async with replicas(1, paths=("/v1/messages",)) as [one], serve([one], limits=limits) as gateway:
        one.script.extend([pinging] * 2)
        asked = {"model": "tiny", "max_tokens": 1, "stream": True, "messages": [{"role": "user", "content": "a"}]}
        async with gateway.http.post("/v1/messages", json=asked) as answer:
            text = await answer.text()
        assert answer.status == 502
        assert "nothing of an answer" in text
        await gateway.idle()


UNREADABLE = b'{"object": 1e400, "choices": [{"index": 0, "text": "a"}]}'
"""In whole. Of one prompt's answer nobody reads this."""


async def test_answers_that_cannot_be_merged_are_the_replicas_mistake(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script.extend([rubbish(UNREADABLE, "application/json")] * 2)
        code, body, _ = await gateway.complete(prompt=["a", "b"])
        assert (code, body["error"]["code"]) == (502, "engine_protocol_error")


@pytest.mark.parametrize("body", [b'{"error": 1e400}', b'{"error": {"message": "\xff"}}'])
def test_an_error_that_cannot_be_read_in_whole_is_still_one_in_the_clients_form(body: bytes) -> None:
    error = json.loads(in_style(ErrorStyle.ANTHROPIC, 422, body))["error"]
    assert error == {"type": "invalid_request_error", "message": "the replica refuses the request"}


async def test_a_replicas_garbage_is_cut_in_messages_and_log(serve: Serve) -> None:
    connections = set[asyncio.StreamWriter]()

    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)
        head = await reader.read(4096)  # nothing, if the connection is closed before it was used
        if head.startswith(b"GET /v1/models"):
            body = b'{"data": [{"id": "tiny", "max_model_len": 8192}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        else:
            writer.write(b"garbage " * 2500)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        connections.remove(writer)

    server = await asyncio.start_server(garbage, "127.0.0.1", 0)
    fake = FakeReplica()
    fake.port = server.sockets[0].getsockname()[1]
    async with server:
        async with serve([fake]) as gateway:
            with capture_logs() as logs:
                code, body, _ = await gateway.complete()
        await eventually(lambda: not connections)  # a check of the replica may just have begun
        assert (code, body["error"]["type"]) == (502, "engine_error")
        assert "garbage" in body["error"]["message"] and len(body["error"]["message"]) < 400
        assert max(len(str(line)) for line in logs) < 800


async def test_an_empty_answer_is_called_so(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script.append(rubbish(b"", "text/event-stream"))
        _, body, _ = await gateway.complete(stream=True)
        assert "empty" in body["error"]["message"]


async def test_a_replica_restarted_with_another_model_between_two_checks_is_found_by_its_404(serve: Serve) -> None:
    rarely = HealthConfig(check_interval_s=1000.0)
    async with replicas(1) as [one], serve([one], health=rarely) as gateway:
        await one.stop()
        one.models = [{"id": "new"}]
        one.script.append(status(404))
        await one.start()
        assert (await gateway.complete(model="tiny"))[0] == 404
        await eventually(lambda: "new" in gateway.gateway.serving.replicas.models())
        assert (await gateway.complete(model="new"))[0] == 200


async def test_a_replica_that_is_what_it_was_stays_whatever_it_does_not_find(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        [before] = gateway.gateway.serving.replicas.values()
        parsed = one.questions
        one.script.append(status(404))
        assert (await gateway.complete())[0] == 404
        await eventually(lambda: not before.suspect.is_set() and one.questions > parsed + 2)
        assert list(gateway.gateway.serving.replicas.values()) == [before]


async def test_a_replica_that_often_does_not_find_something_is_not_asked_each_time_what_it_is(serve: Serve) -> None:
    rarely = HealthConfig(check_interval_s=1000.0)
    async with replicas(1) as [one], serve([one], health=rarely) as gateway:
        [live] = gateway.gateway.serving.replicas.values()
        with (
            patch.object(live.engine, "probe", wraps=live.engine.probe) as probe,
            patch.object(live.engine, "check_ready", wraps=live.engine.check_ready) as check,
        ):
            for number in range(4):
                one.script.append(status(404))
                assert (await gateway.complete())[0] == 404
                await eventually(lambda number=number: check.call_count == number + 1, "it is checked")
            assert probe.call_count == 1


def test_an_event_without_end_is_given_up() -> None:
    splitter = EventSplitter(max_event_bytes=1000)
    assert splitter.feed(b"data: " + b"a" * 900 + b"\n\n" + b"data: ") == [b"a" * 900]
    with pytest.raises(EngineProtocolError, match="1000"):
        for _ in range(3):
            splitter.feed(b"b" * 500)


def test_what_is_held_back_is_one_event_not_all_that_came() -> None:
    splitter = EventSplitter(max_event_bytes=100)
    event = json.dumps({"text": "a" * 50}).encode()
    assert splitter.feed(b"data: " + event + b"\n\n") == [event]
    assert [splitter.feed(b"data: " + event + b"\n\n")[0] for _ in range(10)] == [event] * 10


async def test_a_replica_without_tokenize_is_not_checked_at_every_request(serve: Serve) -> None:
    rarely = HealthConfig(check_interval_s=1000.0)
    async with replicas(1) as [one], serve([one], health=rarely) as gateway:
        one.tokenizes = False
        parsed = one.questions
        for i in range(5):
            assert (await gateway.complete(prompt=f"prompt {i}"))[0] == 200
        [live] = gateway.gateway.serving.replicas.values()
        assert (one.questions, live.suspect.is_set()) == (parsed, False)
