"""Clients that go away, limits, and the shutdown: nothing may be left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.conftest import Serve, Served
from gateway.fakes import FakeReplica, gated, gated_stream, replicas
from preble.config import LimitsConfig, TimeoutsConfig
from support.waiting import eventually


async def left(gateway: Served, fields: dict[str, Any], when: Any) -> None:
    """Send a completion and go away once `when` holds."""
    request = asyncio.create_task(gateway.complete(**fields))
    await eventually(when)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


async def test_a_client_that_leaves_before_its_answer_has_the_engine_stop(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script.append(gated)
        await left(gateway, {}, lambda: one.running == 1)
        await eventually(lambda: one.aborts == 1)
        await gateway.idle()
        assert 'status="499"} 1.0' in await gateway.metrics()


async def test_a_client_that_leaves_in_the_middle_of_a_stream_has_the_engine_stop(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script.append(gated_stream)
        async with gateway.http.post("/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            async for _ in answer.content:
                break
            assert gateway.gateway.serving.num_in_flight == 1
            answer.close()
        await eventually(lambda: one.aborts == 1)
        await gateway.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_a_list_that_leaves_has_all_engines_stop(serve: Serve, stream: bool) -> None:
    async with replicas(2) as fakes, serve(fakes) as gateway:
        for fake in fakes:
            fake.script.append(gated)
        fields = {"prompt": ["a", "b"], "stream": stream}
        await left(gateway, fields, lambda: all(fake.running == 1 for fake in fakes))
        await eventually(lambda: all(fake.aborts == 1 for fake in fakes))
        await gateway.idle()


async def test_a_client_that_leaves_while_its_prompt_is_tokenized_is_never_placed(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.tokenize_gated = True
        await left(gateway, {}, lambda: one.tokenizing == 1)
        await gateway.idle()
        assert one.requests == []
        one.gate.set()
        assert (await gateway.complete())[0] == 200


async def test_a_client_that_leaves_while_sending_its_body_costs_nothing(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        sent = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield b'{"prompt": "'
            sent.set()
            await asyncio.Event().wait()

        request = asyncio.create_task(gateway.http.post("/v1/completions", data=body()).__aenter__())
        await sent.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        text = ""
        while 'status="499"} 1.0' not in text:
            text = await gateway.metrics()
        assert one.requests == []


async def test_a_body_that_does_not_arrive_is_given_up(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one], timeouts=TimeoutsConfig(body_s=0.2, shutdown_s=10.0)) as gateway:
        never = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield b'{"prompt": "'
            await never.wait()

        async with gateway.http.post("/v1/completions", data=body()) as answer:
            assert answer.status == 408
            assert (await answer.json())["error"]["code"] == "request_timeout"
            never.set()


async def test_one_request_more_than_fit_is_asked_to_come_back(serve: Serve) -> None:
    limits = LimitsConfig(max_in_flight=2, retry_after_s=7.0)
    async with replicas(1) as [one], serve([one], limits=limits) as gateway:
        one.script.extend([gated, gated])
        running = [asyncio.create_task(gateway.complete()) for _ in range(2)]
        await eventually(lambda: one.running == 2)
        status, body, headers = await gateway.complete()
        assert (status, body["error"]["code"], headers["retry-after"]) == (429, "overloaded", "7")
        one.gate.set()
        assert [answer[0] for answer in await asyncio.gather(*running)] == [200, 200]
        assert (await gateway.complete())[0] == 200
        status, body, _ = await gateway.complete(prompt=["a", "b", "c"])
        assert (status, body["error"]["param"]) == (400, "prompt")


async def test_the_same_request_id_twice_at_once_is_distinguished(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script.extend([gated, gated])

        async def ask() -> str:
            headers = {"X-Request-Id": "same"}
            async with gateway.http.post("/v1/completions", json={"prompt": "a"}, headers=headers) as answer:
                assert answer.status == 200
                return answer.headers["x-request-id"]

        asks = [asyncio.create_task(ask()) for _ in range(2)]
        await eventually(lambda: one.running == 2)
        one.gate.set()
        ids = await asyncio.gather(*asks)
        assert "same" in ids and len(set(ids)) == 2


async def test_shutdown_finishes_what_runs(serve: Serve) -> None:
    async with replicas(1) as [one]:
        async with serve([one]) as gateway:
            one.script.append(gated_stream)
            answer = await gateway.http.post("/v1/completions", json={"prompt": "a", "stream": True})
            stopped = asyncio.create_task(stop(gateway))
            await refused(gateway)
            one.gate.set()
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
            await stopped
        assert one.aborts == 0


async def test_shutdown_aborts_what_runs_too_long_with_an_error(serve: Serve) -> None:
    async with replicas(1) as [one]:
        async with serve([one], timeouts=TimeoutsConfig(shutdown_s=0.0)) as gateway:
            one.script.extend([gated, gated_stream])
            whole = asyncio.create_task(gateway.complete())
            await eventually(lambda: one.running == 1)
            stream = await gateway.http.post("/v1/completions", json={"prompt": "a", "stream": True})
            stopped = asyncio.create_task(stop(gateway))
            status, body, _ = await whole
            assert (status, body["error"]["code"]) == (503, "shutting_down")
            assert b'"code":"shutting_down"' in await stream.read()
            await stopped
        await eventually(lambda: one.aborts == 2)


async def stop(gateway: Served) -> None:
    await gateway.stop()


async def refused(gateway: Served) -> None:
    """Wait until no new connection is accepted."""
    # asyncio's own event loop loses a connection that it accepts in the very turn in which the server closes.
    await eventually(lambda: not any(server.is_serving() for server in gateway.gateway._server.servers))
    host, _, port = gateway.gateway.url.removeprefix("http://").partition(":")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))


def running(fakes: list[FakeReplica]) -> int:
    return sum(fake.running for fake in fakes)


async def test_a_storm_of_every_kind_of_end_leaves_nothing_in_flight(serve: Serve) -> None:
    async with replicas(3) as fakes, serve(fakes, policy="e2") as gateway:
        asks = [
            asyncio.create_task(gateway.complete(prompt=f"prompt {i % 7} {'x' * (i % 5) * 40}", stream=False))
            for i in range(60)
        ]
        for fake in fakes:
            fake.script.extend([gated] * 8)
        await eventually(lambda: running(fakes) > 0)
        for ask in asks[::3]:
            ask.cancel()
        await fakes[0].stop()
        for fake in fakes:
            fake.gate.set()
        answers = await asyncio.gather(*asks, return_exceptions=True)
        ended = [answer for answer in answers if not isinstance(answer, asyncio.CancelledError)]
        assert all(not isinstance(answer, BaseException) for answer in ended)
        await gateway.idle()
