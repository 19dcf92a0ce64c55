"""Replicas that refuse, break, stall or talk nonsense."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.conftest import Serve
from gateway.fakes import (
    Behaviour,
    die_after,
    die_before,
    die_before_body,
    die_midway,
    gated,
    gated_stream,
    replicas,
    rubbish,
    status,
)
from preble.config import EjectionConfig, HealthConfig, LimitsConfig, TimeoutsConfig
from preble.core.types import ReplicaId
from preble.rules.ejection import Standing
from support.waiting import eventually

PATIENT = HealthConfig(check_interval_s=1000.0)
"""Checks so rare that only requests notice a replica's trouble."""


@pytest.mark.parametrize("code", [503, 429])
async def test_a_replica_that_says_not_now_is_left_for_another(serve: Serve, code: int) -> None:
    async with replicas(3) as fakes, serve(fakes) as gateway:
        fakes[0].script.append(status(code))
        fakes[1].script.append(status(code))
        answers = [await gateway.complete() for _ in range(3)]
        assert [answer[0] for answer in answers] == [200, 200, 200]


async def test_where_all_say_not_now_the_client_gets_the_last_ones_answer(serve: Serve) -> None:
    async with replicas(2) as fakes, serve(fakes) as gateway:
        for fake in fakes:
            fake.script.append(status(429, "full"))
        code, body, headers = await gateway.complete()
        assert (code, body["error"]["message"], headers["x-engine"]) == (429, "full", "fake")
        assert [len(fake.requests) for fake in fakes] == [1, 1]


async def test_a_replica_that_is_gone_is_left_and_leaves_the_rotation(serve: Serve) -> None:
    async with replicas(2) as [one, two], serve([one, two], health=PATIENT) as gateway:
        await one.stop()
        for _ in range(2):
            code, _, headers = await gateway.complete()
            assert (code, headers["x-preble-replica"]) == (200, two.url)
        await eventually(lambda: gateway.num_live == 1)
        assert f'preble_moves_total{{model="tiny",replica="{one.url}"}} 1.0' in await gateway.metrics()


async def test_with_every_replica_gone_the_client_gets_a_502_then_a_503(serve: Serve) -> None:
    async with replicas(2) as [one, two], serve([one, two], health=PATIENT) as gateway:
        await one.stop()
        await two.stop()
        code, body, _ = await gateway.complete()
        assert (code, body["error"]["code"]) == (502, "engine_refused")
        await eventually(lambda: gateway.num_live == 0)
        code, body, headers = await gateway.complete()
        assert (code, body["error"]["code"], headers["retry-after"]) == (503, "no_replica", "1")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behaviour", [die_before, die_before_body])
async def test_a_break_before_the_first_byte_moves_the_request_once(
    serve: Serve, behaviour: Behaviour, stream: bool
) -> None:
    async with replicas(3) as fakes, serve(fakes) as gateway:
        for fake in fakes:
            fake.script.extend([behaviour] * 2)  # twice: a break at once is first taken for a stale connection
        async with gateway.http.post("/v1/completions", json={"prompt": "a", "stream": stream}) as answer:
            body = await answer.json()
        assert (answer.status, body["error"]["code"]) == (502, "engine_gone")
        assert sum(bool(fake.requests) for fake in fakes) == 2
        await gateway.idle()


async def test_a_break_before_the_first_byte_is_not_seen_by_the_client(serve: Serve) -> None:
    async with replicas(2) as fakes, serve(fakes) as gateway:
        fakes[0].script.extend([die_before, die_before])
        fakes[1].script.clear()
        answers = [await gateway.complete() for _ in range(2)]
        assert [answer[0] for answer in answers] == [200, 200]


async def test_a_break_after_the_first_byte_of_a_stream_ends_it_with_an_error_event(serve: Serve) -> None:
    async with replicas(2) as fakes, serve(fakes) as gateway:
        for fake in fakes:
            fake.script.append(die_after)
            fake.gate.set()
        async with gateway.http.post("/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            raw = await answer.read()
        first, error, rest = raw.split(b"\n\n")
        assert (answer.status, rest) == (200, b"")
        assert json.loads(first.removeprefix(b"data: "))["choices"][0]["text"] == "a:0"
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_gone"
        assert sum(len(fake.requests) for fake in fakes) == 1


async def test_a_break_within_a_whole_answer_is_a_502(serve: Serve) -> None:
    async with replicas(2) as fakes, serve(fakes) as gateway:
        for fake in fakes:
            fake.script.append(die_midway)
        async with gateway.http.post("/v1/completions", json={"prompt": "a"}) as answer:
            body = await answer.json()
        assert (answer.status, body["error"]["code"]) == (502, "engine_gone")


@pytest.mark.parametrize(("code", "tries"), [(400, 1), (404, 1), (422, 1), (500, 2), (502, 2)])
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_a_replica_pass_through_unchanged(serve: Serve, code: int, tries: int, stream: bool) -> None:
    """An error of the replica's own is tried once more elsewhere; an error of the client's is not."""
    async with replicas(3) as fakes, serve(fakes) as gateway:
        for fake in fakes:
            fake.script.append(status(code, "as it is"))
        answered, body, headers = await gateway.complete(stream=stream)
        assert (answered, body, headers["x-engine"]) == (code, {"error": {"message": "as it is"}}, "fake")
        assert sum(len(fake.requests) for fake in fakes) == tries


@pytest.mark.parametrize("code", [413, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
@pytest.mark.parametrize("sent", [b"Traceback (most recent call last):\n  File", b"<html>", b"", b"\xff"])
async def test_an_error_that_is_not_json_has_openais_form(
    serve: Serve, code: int, stream: bool, prompt: Any, sent: bytes
) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script.extend([rubbish(sent, "text/html", code)] * 2)
        answered, body, headers = await gateway.complete(prompt=prompt, stream=stream)
        assert (answered, body["error"]["code"], headers["content-type"]) == (code, "engine_error", "application/json")
        assert str(code) in body["error"]["message"] and "Traceback" not in str(body)


@pytest.mark.parametrize(
    ("stream", "sent", "content_type"),
    [
        (False, b"<html>oops</html>", "text/html"),
        (False, b'{"choices": [', "application/json"),
        (False, b'"just text"', "application/json"),
        (False, b"", "application/json"),
        (False, b"\xff\xfe\x00", "application/json"),
        (True, b'{"choices": []}', "application/json"),
        (True, b"garbage", "text/event-stream"),
        (True, b"", "text/event-stream"),
    ],
)
async def test_rubbish_is_a_502(serve: Serve, stream: bool, sent: bytes, content_type: str) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script.append(rubbish(sent, content_type))
        code, body, _ = await gateway.complete(stream=stream)
        assert (code, body["error"]["code"]) == (502, "engine_protocol_error")
        await gateway.idle()
        assert (await gateway.complete())[0] == 200


async def test_a_whole_answer_larger_than_is_accepted_is_a_400_and_the_replica_is_not_blamed(serve: Serve) -> None:
    limits, ejection = LimitsConfig(max_answer_bytes=200_000), EjectionConfig()
    async with replicas(2) as fakes, serve(fakes, limits=limits, ejection=ejection) as gateway:
        for fake in fakes:
            long = rubbish(b"x" * 200_001, "application/json")
            fake.script.extend([long] * ejection.consecutive_failures)
        for _ in range(2 * ejection.consecutive_failures):
            answered, body, _ = await gateway.complete()
            assert (answered, body["error"]["code"]) == (400, "answer_too_large")
            assert "larger than 200000 bytes" in body["error"]["message"]
        assert {gateway.gateway.serving.standing(ReplicaId(fake.url)) for fake in fakes} == {Standing.IN}
        assert (await gateway.complete())[0] == 200


@pytest.mark.parametrize("code", [400, 429])
async def test_an_error_larger_than_is_accepted_is_a_502(serve: Serve, code: int) -> None:
    limits = LimitsConfig(max_answer_bytes=200_000)
    async with replicas(1) as [one], serve([one], limits=limits) as gateway:
        one.script.append(status(code, "x" * 200_000))
        answered, body, _ = await gateway.complete()
        assert (answered, body["error"]["code"]) == (502, "engine_protocol_error")
        assert "larger than 200000 bytes" in body["error"]["message"]
        assert (await gateway.complete())[0] == 200


async def test_a_replica_that_takes_too_long_for_its_first_byte_is_a_504_and_not_asked_elsewhere(serve: Serve) -> None:
    hasty = TimeoutsConfig(first_byte_s=0.2, shutdown_s=10.0)
    async with replicas(2) as fakes, serve(fakes, timeouts=hasty) as gateway:
        for fake in fakes:
            fake.script.append(gated)
        code, body, _ = await gateway.complete()
        assert (code, body["error"]["code"]) == (504, "engine_timeout")
        await eventually(lambda: all(fake.running == 0 for fake in fakes))
        assert sum(fake.aborts for fake in fakes) == sum(len(fake.requests) for fake in fakes) <= 1


async def test_a_stream_that_falls_silent_ends_with_an_error_event(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one], timeouts=TimeoutsConfig(idle_s=0.2, shutdown_s=10.0)) as gateway:
        one.script.append(gated_stream)
        async with gateway.http.post("/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            raw = await answer.read()
        assert json.loads(raw.split(b"\n\n")[1].removeprefix(b"data: "))["error"]["code"] == "engine_timeout"
        await eventually(lambda: one.aborts == 1)


async def test_a_request_over_its_total_time_is_aborted_with_a_504(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one], timeouts=TimeoutsConfig(total_s=0.2, shutdown_s=10.0)) as gateway:
        one.script.append(gated)
        code, body, _ = await gateway.complete()
        assert (code, body["error"]["code"]) == (504, "engine_timeout")
        await eventually(lambda: one.running == 0)
        assert one.aborts == len(one.requests)


async def test_one_failing_prompt_of_a_list_fails_the_request_and_aborts_the_others(serve: Serve) -> None:
    async with replicas(3) as fakes, serve(fakes) as gateway:
        fakes[0].script.append(gated)
        fakes[1].script.append(gated)
        fakes[2].script.append(status(400, "bad one"))
        code, body, _ = await gateway.complete(prompt=["a", "b", "c"])
        assert (code, body["error"]["message"]) == (400, "bad one")
        await eventually(lambda: [fake.running for fake in fakes] == [0, 0, 0])
        assert (await gateway.complete())[0] == 200


async def test_one_breaking_prompt_of_a_streamed_list_ends_the_stream_with_an_error(serve: Serve) -> None:
    async with replicas(2) as fakes, serve(fakes) as gateway:
        fakes[0].script.append(gated_stream)
        fakes[1].script.append(die_after)
        fields = {"prompt": ["a", "b"], "stream": True}
        async with gateway.http.post("/v1/completions", json=fields) as answer:
            async for _ in answer.content:
                break
            fakes[1].gate.set()
            raw = await answer.read()
        assert b'"error":{' in raw and b"[DONE]" not in raw
        await eventually(lambda: fakes[0].aborts == 1)
