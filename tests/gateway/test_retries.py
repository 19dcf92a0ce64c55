"""Requests that move from a replica that fails them to one that does not, and the limits of that."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from aiohttp import web

from gateway.conftest import Serve, Served
from gateway.fakes import (
    Behaviour,
    FakeReplica,
    die_after,
    die_before,
    die_midway,
    replicas,
    rubbish,
    send_event,
    started_stream,
    status,
)
from preble.config import RetryConfig
from preble.rules.ejection import LONGEST_LONE_HOLD_S
from support.waiting import eventually

ERROR = b'{"error": {"message": "out of memory"}}'
FAILURES = {
    "500": status(500),
    "502 from a proxy": rubbish(b"<html>", "text/html", 502),
    "an error with status 200": rubbish(ERROR, "application/json"),
    "garbage with status 200": rubbish(b"\xff" * 5000, "application/json"),
    "an empty answer": rubbish(b"", "application/json"),
    "a broken connection": die_before,
}
STREAM_FAILURES = {
    **FAILURES,
    "a stream that begins with an error": rubbish(b"data: " + ERROR + b"\n\n", "text/event-stream"),
}
REQUESTS = 40
MOST_ASKED = 8
"""Three failures and a probe, each sent twice where a kept connection may have been closed for idleness."""


async def failed_by_one_of_four(serve: Serve, behaviour: Behaviour, stream: bool) -> tuple[list[int], int]:
    """The statuses of requests to four replicas of which one always fails, and how many of them it was sent."""
    async with replicas(4) as fakes, serve(fakes, policy="preble") as gateway:
        fakes[0].script.extend([behaviour] * REQUESTS)
        statuses = []
        for i in range(REQUESTS):
            fields = {"prompt": f"{i} is a prompt of its own", "stream": stream}
            async with gateway.http.post("/v1/completions", json=fields) as answer:
                statuses.append(answer.status)
                assert b"error" not in await answer.read()
        return statuses, len(fakes[0].requests)


@pytest.mark.parametrize("name", FAILURES)
async def test_one_failing_replica_of_four_fails_no_request(serve: Serve, name: str) -> None:
    """It is asked three times, ejected, and then probed now and then; it attracts nothing by failing fast."""
    statuses, asked = await failed_by_one_of_four(serve, FAILURES[name], stream=False)
    assert statuses == [200] * REQUESTS and asked <= MOST_ASKED


@pytest.mark.parametrize("name", STREAM_FAILURES)
async def test_one_failing_replica_of_four_fails_no_stream(serve: Serve, name: str) -> None:
    statuses, asked = await failed_by_one_of_four(serve, STREAM_FAILURES[name], stream=True)
    assert statuses == [200] * REQUESTS and asked <= MOST_ASKED


async def test_a_break_within_a_whole_answer_is_not_seen_by_the_client(serve: Serve) -> None:
    async with replicas(2) as [one, two], serve([one, two]) as gateway:
        one.script.append(die_midway)
        assert [(await gateway.complete())[0] for _ in range(2)] == [200, 200]


async def test_a_prompt_of_a_list_moves_as_any_other(serve: Serve) -> None:
    async with replicas(2) as [one, two], serve([one, two]) as gateway:
        one.script.append(status(500))
        code, body, _ = await gateway.complete(prompt=["a", "b"])
        assert code == 200 and [choice["text"] for choice in body["choices"]] == ["a:0", "b:0"]


async def test_a_request_that_two_replicas_fail_is_not_tried_on_a_third(serve: Serve) -> None:
    """The request itself may be what makes them fail."""
    async with replicas(3) as fakes, serve(fakes) as gateway:
        for fake in fakes:
            fake.script.append(rubbish(ERROR, "application/json"))
        code, body, _ = await gateway.complete()
        assert (code, body["error"]["code"]) == (502, "engine_protocol_error")
        assert sum(len(fake.requests) for fake in fakes) == 2


async def test_beyond_the_retry_budget_the_client_gets_the_failure(serve: Serve) -> None:
    """Half of the requests fail at first; a budget of three retries saves three of them."""
    budget = RetryConfig(share=0.0, least=3, window_s=1e6)
    async with replicas(2) as fakes, serve(fakes, retries=budget) as gateway:
        codes = []
        for _ in range(5):
            for fake in fakes:
                fake.script.clear()
                fake.script.append(status(503))
            await gateway.complete()  # one refusal each: the first tries both
            codes.append(sum(len(fake.requests) for fake in fakes))
        assert codes == [2, 4, 6, 7, 8]
        assert "preble_retries_denied_total 3.0" in await gateway.metrics()


async def test_retry_after_is_honoured_while_another_replica_is_left(serve: Serve) -> None:
    async with replicas(2) as [one, two], serve([one, two]) as gateway:
        one.script.append(busy_for("30"))
        assert [(await gateway.complete())[0] for _ in range(6)] == [200] * 6
        assert len(one.requests) == 1, "it was asked again before its time"
        assert len(two.requests) == 6


async def test_the_last_replica_that_says_not_now_is_tried_every_few_seconds(serve: Serve) -> None:
    """A 429 is often about one key, model or size: it must not stop everybody for as long as it says."""
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script += [busy_for("30"), busy_for("30")]
        assert (await gateway.complete())[0] == 429
        while (answer := await gateway.complete())[0] == 503:
            await asyncio.sleep(0.05)
            assert answer[1]["error"]["code"] == "no_replica"
            assert int(answer[2]["retry-after"]) <= math.ceil(LONGEST_LONE_HOLD_S)
        assert answer[0] == 429, "the one request that tried it"
        assert len(one.requests) == 2, "the others were not sent"
        await eventually(lambda: answered(gateway))
        assert [(await gateway.complete())[0] for _ in range(3)] == [200] * 3


async def answered(gateway: Served) -> bool:
    return (await gateway.complete())[0] == 200


def busy_for(seconds: str) -> Behaviour:
    async def behave(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "busy"}}, status=429, headers={"Retry-After": seconds})

    return behave


async def without_done(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await started_stream(request)
    await send_event(response, {"choices": [{"index": 0, "text": "a"}]})
    return response


async def error_at_the_end(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await started_stream(request)
    await send_event(response, {"choices": [{"index": 0, "text": "a"}]})
    await replica.gate.wait()
    await send_event(response, {"error": {"message": "out of memory"}})
    await response.write(b"data: [DONE]\n\n")
    return response


@pytest.mark.parametrize("behaviour", [without_done, error_at_the_end])
async def test_a_stream_without_done_or_with_an_error_is_no_success(serve: Serve, behaviour: Behaviour) -> None:
    """The client gets what the replica sent; decisions and metrics call it a failure."""
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script.append(behaviour)
        async with gateway.http.post("/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            raw = await answer.content.readany()
            one.gate.set()
            raw += await answer.read()
            request_id = answer.headers["x-request-id"]
        assert raw.startswith(b"data: ") and (b"[DONE]" in raw) is (behaviour is error_at_the_end)
        async with gateway.http.get(f"/debug/decisions/{request_id}") as answer:
            [decision] = (await answer.json())["decisions"]
        assert decision["outcome"] == "engine_protocol_error" and decision["output_tokens"] > 0
        assert (
            f'preble_engine_errors_total{{kind="engine_protocol_error",model="tiny",replica="{one.url}"}} 1.0'
            in await gateway.metrics()
        )


async def test_after_its_first_event_a_stream_does_not_move(serve: Serve) -> None:
    async with replicas(2) as [one, two], serve([one, two]) as gateway:
        for fake in (one, two):
            fake.script.append(die_after)
            fake.gate.set()
        async with gateway.http.post("/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            assert b'"engine_gone"' in await answer.read()
        await eventually(lambda: len(one.requests) + len(two.requests) == 1)
