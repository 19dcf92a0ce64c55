"""Replicas come and go."""

from __future__ import annotations

import asyncio
import json

import pytest
import structlog

from gateway.conftest import Serve
from gateway.fakes import gated, gated_stream, replicas, ticking_stream
from preble.config import HealthConfig
from support.waiting import eventually


async def test_the_gateway_starts_although_replicas_are_down_and_takes_them_when_they_come(serve: Serve) -> None:
    async with replicas(2) as [one, two]:
        await one.stop()
        await two.stop()
        async with serve([one, two], live=0) as gateway:
            async with gateway.http.get("/health") as answer:
                assert answer.status == 200
            async with gateway.http.get("/ready") as answer:
                assert answer.status == 503
            status, body, _ = await gateway.complete()
            assert (status, body["error"]["code"]) == (503, "no_replica")
            await one.start()
            await eventually(lambda: gateway.num_live == 1)
            assert (await gateway.complete())[2]["x-preble-replica"] == one.url
            await two.start()
            await eventually(lambda: gateway.num_live == 2)


async def test_each_reason_why_a_replica_is_waited_for_is_logged_once(serve: Serve) -> None:
    structlog.reset_defaults()  # a command that another test ran may log errors only
    async with replicas(1) as [one]:
        await one.stop()
        with structlog.testing.capture_logs() as logs:

            def told() -> list[str]:
                return [entry["error"] for entry in logs if entry["event"] == "replica_waited_for"]

            async with serve([one], live=0):
                await eventually(lambda: len(told()) == 1)
                one.healthy = False
                await one.start()
                await eventually(lambda: len(told()) == 2)
                parsed = one.questions
                await eventually(lambda: one.questions >= parsed + 3)
    refused, unwell = told()
    assert "Connection refused" in refused and "status 500" in unwell


async def test_a_replica_that_fails_its_checks_leaves_and_comes_back(serve: Serve) -> None:
    async with replicas(2) as [one, two], serve([one, two]) as gateway:
        one.healthy = False
        await eventually(lambda: gateway.num_live == 1)
        for _ in range(3):
            assert (await gateway.complete())[2]["x-preble-replica"] == two.url
        assert f'preble_replica_up{{replica="{one.url}"}} 0.0' in await gateway.metrics()
        one.healthy = True
        await eventually(lambda: gateway.num_live == 2)


async def test_a_request_on_a_replica_that_leaves_the_rotation_still_ends_well(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script.append(gated)
        request = asyncio.create_task(gateway.complete())
        await eventually(lambda: one.running == 1)
        one.healthy = False
        await eventually(lambda: gateway.num_live == 0)
        gateway.scheduler.check()
        one.healthy = True
        await eventually(lambda: gateway.num_live == 1)
        one.gate.set()
        status, _, _ = await request
        assert status == 200
        await gateway.idle()


async def test_a_killed_replica_loses_no_request_that_had_no_answer_yet(serve: Serve) -> None:
    async with replicas(2) as [one, two], serve([one, two]) as gateway:
        one.script.extend([gated] * 8)
        requests = [asyncio.create_task(gateway.complete()) for _ in range(8)]
        await eventually(lambda: one.running == 4)
        await one.stop()
        answers = await asyncio.gather(*requests)
        assert [answer[0] for answer in answers] == [200] * 8
        assert {answer[2]["x-preble-replica"] for answer in answers} == {two.url}
        await eventually(lambda: gateway.num_live == 1)


HASTY = HealthConfig(check_interval_s=0.05, check_timeout_s=1.0, failures=2, retry_min_s=0.02, retry_max_s=0.05)
"""Its checks time out soon, yet not on a replica that answers, though the machine be busy."""


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_without_a_byte_leave_a_replica_whose_machine_is_silent(serve: Serve, stream: bool) -> None:
    async with replicas(2) as [one, two], serve([one, two], health=HASTY) as gateway:
        one.script.extend([gated] * 8)
        fields = {"model": "tiny", "prompt": "a", "stream": stream}
        requests = [
            asyncio.create_task(gateway.http.post("/v1/completions", json=fields).__aenter__()) for _ in range(8)
        ]
        await eventually(lambda: one.running == 4)
        one.silent = True
        answers = await asyncio.gather(*requests)
        for answer in answers:
            await answer.read()
        assert {(answer.status, answer.headers["x-preble-replica"]) for answer in answers} == {(200, two.url)}
        await eventually(lambda: one.aborts >= 4)
        assert gateway.num_live == 1


async def test_a_stream_that_has_begun_on_a_machine_that_falls_silent_ends_with_an_error(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one], health=HASTY) as gateway:
        one.script.append(gated_stream)
        async with gateway.http.post("/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            await answer.content.readany()
            one.silent = True
            rest = await answer.read()
        error = json.loads(rest.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
        assert (error["code"], "was taken out of the rotation" in error["message"]) == ("engine_gone", True)
        await eventually(lambda: one.aborts >= 1)


async def test_with_nowhere_to_go_a_request_on_a_silent_machine_fails_cleanly(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one], health=HASTY) as gateway:
        one.script.append(gated)
        request = asyncio.create_task(gateway.complete())
        await eventually(lambda: one.running == 1)
        one.silent = True
        status, body, _ = await request
        assert (status, body["error"]["code"]) == (502, "engine_gone")


async def test_a_stream_that_flows_is_left_alone_though_its_replica_answers_no_check(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one], health=HASTY) as gateway:
        one.script.append(ticking_stream)
        async with gateway.http.post("/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            await answer.content.readany()
            one.silent = True
            await eventually(lambda: gateway.num_live == 0)
            one.gate.set()
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_a_replica_that_comes_back_with_other_models_serves_those(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        await one.stop()
        await eventually(lambda: gateway.num_live == 0)
        one.models = [{"id": "new"}]
        await one.start()
        await eventually(lambda: gateway.num_live == 1)
        assert (await gateway.complete(model="tiny"))[0] == 404
        assert (await gateway.complete(model="new"))[0] == 200


async def test_an_adapter_is_served_from_when_it_is_loaded_until_it_is_unloaded(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        [replica] = gateway.gateway.serving.replicas.values()

        async def status() -> int:
            return (await gateway.complete(model="sql"))[0]

        async def is_served() -> bool:
            return await status() == 200

        async def is_unknown() -> bool:
            return await status() == 404

        assert await is_unknown()
        one.models.append({"id": "sql", "parent": "tiny"})
        await eventually(is_served, "the adapter is served")
        assert replica.info.adapters == replica.engine.adapters == ("sql",)
        one.models.pop()
        await eventually(is_unknown, "the adapter is served no more")
        assert list(gateway.gateway.serving.replicas.values()) == [replica], "it has never left the rotation"


async def test_a_replica_whose_base_model_is_exchanged_joins_again(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        [before] = gateway.gateway.serving.replicas.values()
        one.models[:] = [{"id": "new", "max_model_len": 100}]

        def is_new() -> bool:
            return any(r is not before and r.info.models == ("new",) for r in gateway.gateway.serving.replicas.values())

        await eventually(is_new, "it has joined with its new model")


async def test_a_suspected_replica_that_is_what_it_was_stays(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        [replica] = gateway.gateway.serving.replicas.values()
        checked_again_after = one.questions + 10
        replica.suspect.set()
        await eventually(lambda: one.questions > checked_again_after, "it is checked several times")
        assert list(gateway.gateway.serving.replicas.values()) == [replica]


async def test_without_a_tokenize_endpoint_prefixes_still_match(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one], policy="e2") as gateway:
        one.tokenizes = False
        text = "the same beginning " * 20
        assert (await gateway.complete(prompt=text))[2]["x-preble-matched-tokens"] == "0"
        assert int((await gateway.complete(prompt=text + "and more"))[2]["x-preble-matched-tokens"]) >= 80
        messages = [{"role": "user", "content": text}]
        for expected in (False, True):
            async with gateway.http.post("/v1/chat/completions", json={"messages": messages}) as answer:
                assert answer.status == 200
                assert (answer.headers["x-preble-matched-tokens"] != "0") == expected
