"""A replica that fails whatever it gets, though it says that it is well, costs next to nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from gateway.conftest import Serve, Served
from gateway.fakes import Behaviour, FakeReplica, answer, gated, replicas, rubbish, status
from preble.config import EjectionConfig, RetryConfig
from support.waiting import PATIENCE_S, eventually

QUICK = EjectionConfig(stall_s=0.3, first_out_s=1000.0, longest_out_s=1000.0)


async def hang(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Takes the request and never answers."""
    await replica.gate.wait()
    return await answer(replica, request, body)


WAYS: dict[str, Behaviour] = {
    "500": status(500),
    "502": status(502),
    "an error in place of an answer": rubbish(b'{"error": {"message": "no"}}', "application/json"),
    "garbage": rubbish(b"<html>", "text/html"),
    "an empty answer": rubbish(b"", "application/json"),
}


class Always(list[Behaviour]):
    """A script that never ends."""

    def popleft(self) -> Behaviour:
        return self[0]


def breaks(fake: FakeReplica, behaviour: Behaviour) -> None:
    fake.script = Always([behaviour])  # type: ignore[assignment]


async def streamed(gateway: Served, prompt: str = "hello") -> int:
    """The status of a completion that is streamed, read to its end."""
    async with gateway.http.post("/v1/completions", json={"prompt": prompt, "stream": True}) as reply:
        await reply.read()
        return reply.status


async def standings(gateway: Served) -> dict[str, str]:
    async with gateway.http.get("/debug/replicas") as page:
        return {one["replica"]: one["standing"] for one in (await page.json())["replicas"]}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_replica_that_fails_every_request_is_ejected_and_costs_no_client_anything(
    serve: Serve, way: str, stream: bool
) -> None:
    with capture_logs() as log:
        async with replicas(4) as fakes, serve(fakes, ejection=QUICK) as gateway:
            breaks(fakes[0], WAYS[way])
            for number in range(40):
                body = {"prompt": f"p{number}", "stream": stream}
                async with gateway.http.post("/v1/completions", json=body) as reply:
                    assert reply.status == 200
                    await reply.read()
            assert len(fakes[0].requests) == QUICK.consecutive_failures
            assert (await standings(gateway))[fakes[0].url] == "ejected"
            assert f'preble_replica_ejected{{replica="{fakes[0].url}"}} 1.0' in await gateway.metrics()
    [ejected] = [event for event in log if event["event"] == "replica_ejected"]
    assert repr(ejected["reason"]) == "'consecutive failures'"


async def streamed_or_hangs(gateway: Served, hanging: FakeReplica) -> asyncio.Task[int]:
    """A stream that has ended, or hangs. Begin one after the other: then no other replica has several that it has not
    begun to answer, and none is taken for stalled, however slow this machine is."""
    num_hanging = hanging.running
    stream = asyncio.create_task(streamed(gateway))
    await eventually(lambda: stream.done() or hanging.running > num_hanging)
    return stream


async def test_a_replica_that_hangs_is_ejected_and_what_waits_there_moves(serve: Serve) -> None:
    async with replicas(4) as fakes, serve(fakes, ejection=QUICK) as gateway:
        breaks(fakes[0], hang)
        streams = []
        while fakes[0].running < QUICK.consecutive_failures:
            streams.append(await streamed_or_hangs(gateway, fakes[0]))
        assert {await stream for stream in streams} == {200}
        assert (await standings(gateway))[fakes[0].url] == "ejected"


async def test_whole_answers_move_when_a_probe_finds_that_their_replica_still_hangs(serve: Serve) -> None:
    often = EjectionConfig(stall_s=0.3, first_out_s=0.1, longest_out_s=0.1)
    async with replicas(4) as fakes, serve(fakes, ejection=often) as gateway:
        breaks(fakes[0], hang)
        whole = [asyncio.create_task(gateway.complete(prompt=f"w{number}")) for number in range(4)]
        await eventually(lambda: fakes[0].running == 1)
        streams = []
        while not all(task.done() for task in whole):
            streams.append(await streamed_or_hangs(gateway, fakes[0]))
        assert {(await task)[0] for task in whole} == {200}
        fakes[0].gate.set()
        await asyncio.gather(*streams)


async def test_answers_that_come_whole_are_not_moved_however_long_they_take(serve: Serve) -> None:
    async with replicas(2) as fakes, serve(fakes, ejection=QUICK) as gateway:
        for fake in fakes:
            fake.script.extend([gated] * QUICK.consecutive_failures)
        num_waiting = 2 * QUICK.consecutive_failures
        waiting = [asyncio.create_task(gateway.complete(prompt=f"p{number}")) for number in range(num_waiting)]
        await eventually(lambda: sum(fake.running for fake in fakes) == num_waiting)
        assert [(await gateway.complete())[0] for _ in fakes] == [200, 200]
        much_later = asyncio.get_running_loop().time() + 10 * QUICK.stall_s
        gateway.gateway.serving._placements.eject_outliers(much_later)
        assert set((await standings(gateway)).values()) == {"in"}
        for fake in fakes:
            fake.gate.set()
        assert {(await task)[0] for task in waiting} == {200}
        assert [fake.aborts for fake in fakes] == [0, 0]


async def test_a_repaired_replica_comes_back(serve: Serve) -> None:
    quick = EjectionConfig(first_out_s=0.05)
    async with replicas(2) as fakes, serve(fakes, ejection=quick) as gateway:
        fakes[0].script.extend([status(500)] * quick.consecutive_failures)

        async def until_back() -> None:
            been_out = False
            while not (been_out and set((await standings(gateway)).values()) == {"in"}):
                assert (await gateway.complete())[0] == 200
                been_out |= (await standings(gateway))[fakes[0].url] != "in"

        await asyncio.wait_for(until_back(), PATIENCE_S)


async def test_where_all_fail_retries_do_not_multiply_the_load(serve: Serve) -> None:
    retries = RetryConfig(share=0.1, least=2, window_s=1000.0)
    async with replicas(4) as fakes, serve(fakes, retries=retries) as gateway:
        for fake in fakes:
            breaks(fake, status(500))
        for _ in range(50):
            assert (await gateway.complete())[0] == 500
        assert sum(len(fake.requests) for fake in fakes) <= 50 * 1.1 + 2


async def test_a_replica_that_was_never_up_is_seen_from_the_first_second(serve: Serve) -> None:
    async with replicas(2) as fakes:
        await fakes[1].stop()
        async with serve(fakes, live=1) as gateway:
            async with gateway.http.get("/ready") as page:
                ready = await page.json()
            assert (ready["replicas"], ready["configured"]) == (1, 2)
            assert ready["states"] == {"live": 1, "joining": 1}
            assert f'preble_replica_up{{replica="{fakes[1].url}"}} 0.0' in await gateway.metrics()

            async def row() -> dict[str, Any]:
                async with gateway.http.get("/debug/replicas") as page:
                    return dict((await page.json())["members"][1])

            async def was_refused() -> bool:
                return "refused" in str((await row())["last_error"])

            await eventually(was_refused)
            assert (await row())["state"] == "joining"
            await fakes[1].start()
            await eventually(lambda: gateway.num_live == 2)
            assert (await row())["state"] == "live"
