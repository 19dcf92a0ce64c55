"""While no replica takes requests, they wait for one: a small fleet may restart as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.conftest import Serve, Served
from gateway.fakes import FakeReplica, gated, replicas
from preble.config import AuthConfig, LimitsConfig, TimeoutsConfig
from support.waiting import eventually

PATIENT = TimeoutsConfig(shutdown_s=10.0)
"""As it is by default: requests wait."""
BODY = {"model": "tiny", "prompt": "hello"}
ID = "x-request-id"


async def gone(gateway: Served, fakes: list[FakeReplica]) -> None:
    """Stop all replicas; return when none takes requests."""
    for fake in fakes:
        await fake.stop()
    await eventually(lambda: gateway.num_live == 0)


def waiting(gateway: Served, count: int) -> Callable[[], bool]:
    return lambda: gateway.gateway.serving.replica_wait.num_waiting == count


async def answer(gateway: Served, **fields: Any) -> int:
    """The status of a completion's answer, which may be a stream."""
    async with gateway.http.post("/v1/completions", json=BODY | fields) as got:
        text = await got.text()
        assert got.status != 200 or '"error"' not in text
        return got.status


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"prompt": ["one", "two", "three"]}])
async def test_requests_wait_until_a_replica_is_back(serve: Serve, fields: dict[str, Any]) -> None:
    async with replicas(2) as fakes, serve(fakes, timeouts=PATIENT) as gateway:
        await gone(gateway, fakes)
        asked = [asyncio.create_task(answer(gateway, **fields)) for _ in range(5)]
        await eventually(waiting(gateway, 5 * len(fields.get("prompt", "1"))))
        assert f'preble_prompts_queued{{model=""}} {5.0 * len(fields.get("prompt", "1"))}' in await gateway.metrics()
        async with gateway.http.get("/ready") as page:
            assert (page.status, (await page.json())["status"]) == (503, "no replica is up")
        await fakes[0].start()
        assert await asyncio.gather(*asked) == [200] * 5
        assert waiting(gateway, 0)()


async def test_they_go_in_the_order_in_which_they_came(serve: Serve) -> None:
    names = [f"request-{i}" for i in range(8)]
    async with replicas(1) as fakes, serve(fakes, timeouts=PATIENT) as gateway:
        await gone(gateway, fakes)
        asked = []
        for name in names:
            asked.append(asyncio.create_task(gateway.http.post("/v1/completions", json=BODY, headers={ID: name})))
            await eventually(waiting(gateway, len(asked)))
        await fakes[0].start()
        for answer in await asyncio.gather(*asked):
            async with answer:
                assert answer.status == 200
        placed = [decision.request_id for decision in gateway.gateway.serving.recent.latest(8)]
        assert placed == names[::-1], "the newest decision comes first"


async def test_an_upload_waits_too(serve: Serve) -> None:
    async with replicas(1, paths=("/v1/audio/transcriptions",)) as fakes, serve(fakes, timeouts=PATIENT) as gateway:
        await gone(gateway, fakes)
        sound: dict[str, Any] = {"data": b'{"prompt": "a"}', "headers": {"content-type": "audio/wav"}}
        asked = asyncio.create_task(gateway.http.post("/v1/audio/transcriptions", **sound))
        await eventually(waiting(gateway, 1))
        await fakes[0].start()
        async with await asked as got:
            assert got.status == 200


async def test_a_request_whose_only_replica_dies_goes_to_the_next_that_comes(serve: Serve) -> None:
    async with replicas(1) as fakes, serve(fakes, timeouts=PATIENT) as gateway:
        fakes[0].script.append(gated)
        asked = asyncio.create_task(answer(gateway))
        await eventually(lambda: fakes[0].running == 1)
        await gone(gateway, fakes)
        await eventually(waiting(gateway, 1))
        await fakes[0].start()
        assert await asked == 200
        assert len(fakes[0].requests) == 2


async def test_after_the_longest_wait_the_client_gets_a_503(serve: Serve) -> None:
    short = TimeoutsConfig(shutdown_s=10.0, no_replica_wait_s=0.05)
    async with replicas(1) as fakes, serve(fakes, timeouts=short) as gateway:
        await gone(gateway, fakes)
        code, body, headers = await gateway.complete()
        assert (code, body["error"]["code"], headers["retry-after"]) == (503, "no_replica", "1")


async def test_a_client_that_leaves_gives_its_place_back(serve: Serve) -> None:
    async with replicas(1) as fakes, serve(fakes, timeouts=PATIENT) as gateway:
        await gone(gateway, fakes)
        asked = asyncio.create_task(answer(gateway))
        await eventually(waiting(gateway, 1))
        asked.cancel()
        await eventually(waiting(gateway, 0))
        await gateway.idle()
        assert gateway.gateway.bodies.held == 0


async def test_no_more_wait_than_there_is_room_for(serve: Serve) -> None:
    limits = LimitsConfig(max_in_flight=5)
    keys = AuthConfig(api_keys=("alice", "bob"), admin_keys=("op",))
    async with replicas(1) as fakes, serve(fakes, timeouts=PATIENT, limits=limits, auth=keys) as gateway:
        await gone(gateway, fakes)

        async def ask(key: str) -> int:
            async with gateway.http.post("/v1/completions", json=BODY, headers={"x-api-key": key}) as got:
                return got.status

        asked = []
        for i in range(4):
            asked.append(asyncio.create_task(ask("alice")))
            await eventually(waiting(gateway, i + 1))
        assert await ask("alice") == 429, "the rest of the room is for others"
        asked.append(asyncio.create_task(ask("bob")))
        await eventually(waiting(gateway, 5))
        assert await ask("bob") == 429
        await fakes[0].start()
        assert await asyncio.gather(*asked) == [200] * 5


async def test_a_gateway_that_drains_lets_nobody_wait(serve: Serve) -> None:
    """Another gateway may have a replica."""
    async with replicas(1) as fakes, serve(fakes, timeouts=PATIENT) as gateway:
        await gone(gateway, fakes)
        asked = asyncio.create_task(gateway.complete())
        await eventually(waiting(gateway, 1))
        gateway.gateway.drain()
        assert (await asked)[0] == 503
        assert (await gateway.complete())[0] == 503


async def test_a_drained_fleet_is_waited_for_too(serve: Serve) -> None:
    async with replicas(1) as fakes, serve(fakes, timeouts=PATIENT) as gateway:
        members = gateway.gateway.serving.members
        members.wanted.drain(fakes[0].url)
        members.reconcile()
        asked = asyncio.create_task(answer(gateway))
        await eventually(waiting(gateway, 1))
        members.wanted.undrain(fakes[0].url)
        members.reconcile()
        assert await asked == 200
