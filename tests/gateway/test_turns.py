"""Tenants take turns: a flood of one waits in the gateway, and the others go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.conftest import Serve, Served
from gateway.fakes import FakeReplica, gated, replicas
from gateway.test_ejection import breaks
from gateway.test_tenants import table
from preble.config import AuthConfig, EjectionConfig
from support.waiting import eventually

FLOOD = 20


@pytest.fixture
def auth(tmp_path: Path) -> AuthConfig:
    path = tmp_path / "keys.toml"
    path.write_text(table("flood", "key-f") + table("other", "key-o"))
    return AuthConfig(keys_file=str(path))


async def ask(gateway: Served, key: str, **headers: str) -> tuple[int, dict[str, Any], str | None]:
    body = {"model": "tiny", "prompt": f"{key} asks " + "something long " * 100, "stream": True}
    headers = {"x-api-key": key, **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with gateway.http.post("/v1/completions", json=body, headers=headers) as answer:
        data = await (answer.json() if answer.status >= 400 else answer.read())
        return answer.status, data if isinstance(data, dict) else {}, answer.headers.get("Retry-After")


def asked_by(fake: FakeReplica, key: str) -> int:
    return sum(str(body["prompt"]).startswith(key) for body in fake.requests)


async def flooded(gateway: Served, fake: FakeReplica) -> list[asyncio.Task[Any]]:
    """A tenant's flood, of which most waits in the gateway."""
    breaks(fake, gated)
    tasks = [asyncio.create_task(ask(gateway, "key-f")) for _ in range(FLOOD)]
    waiting = gateway.gateway.serving
    await eventually(lambda: waiting.num_waiting >= FLOOD - 5 and waiting.num_waiting + fake.running == FLOOD)
    return tasks


async def test_a_tenant_that_floods_does_not_hold_up_another(serve: Serve, auth: AuthConfig) -> None:
    async with replicas(1) as [one], serve([one], auth=auth, ejection=EjectionConfig(enabled=False)) as gateway:
        flood = await flooded(gateway, one)
        before = asked_by(one, "key-f")
        other = asyncio.create_task(ask(gateway, "key-o"))
        await eventually(lambda: asked_by(one, "key-o") == 1)
        assert asked_by(one, "key-f") == before
        assert f"preble_prompts_queued {float(FLOOD - before)}" in await gateway.metrics()
        one.gate.set()
        assert (await other)[0] == 200
        assert {status for status, _, _ in await asyncio.gather(*flood)} == {200}


async def test_a_request_that_may_not_wait_is_refused_with_a_time(serve: Serve, auth: AuthConfig) -> None:
    async with replicas(1) as [one], serve([one], auth=auth) as gateway:
        flood = await flooded(gateway, one)
        status, body, retry_after = await ask(gateway, "key-f", x_preble_max_wait="0.05")
        assert (status, body["error"]["code"]) == (429, "overloaded")
        assert int(retry_after or 0) >= 1
        one.gate.set()
        await asyncio.gather(*flood)


@pytest.mark.parametrize(("header", "value"), [("x_preble_priority", "urgent"), ("x_preble_max_wait", "soon")])
async def test_a_wrong_header_about_turns_is_refused(serve: Serve, auth: AuthConfig, header: str, value: str) -> None:
    async with replicas(1) as [one], serve([one], auth=auth) as gateway:
        status, body, _ = await ask(gateway, "key-f", **{header: value})
        assert status == 400
        assert value in body["error"]["message"]


async def test_a_batch_waits_for_people(serve: Serve, auth: AuthConfig) -> None:
    async with replicas(1) as [one], serve([one], auth=auth) as gateway:
        flood = await flooded(gateway, one)
        urgent = asyncio.create_task(ask(gateway, "key-f", x_request_id="urgent"))
        batch = asyncio.create_task(ask(gateway, "key-f", x_preble_priority="batch", x_request_id="batch"))
        await eventually(lambda: gateway.gateway.serving.num_waiting >= FLOOD - 3)
        one.gate.set()
        await asyncio.gather(*flood, urgent, batch)
        assert {k.lower(): v for k, v in one.headers[-1].items()}["x-request-id"] == "batch"


async def test_clients_that_leave_while_they_wait_leave_nothing_behind(serve: Serve, auth: AuthConfig) -> None:
    async with replicas(1) as [one], serve([one], auth=auth) as gateway:
        flood = await flooded(gateway, one)
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        await eventually(lambda: gateway.gateway.serving.num_waiting == 0)
        one.gate.set()
        assert (await ask(gateway, "key-f"))[0] == 200


async def test_a_replica_that_is_lost_gives_its_requests_turns_elsewhere(serve: Serve, auth: AuthConfig) -> None:
    async with replicas(2) as fakes, serve(fakes, auth=auth) as gateway:
        for fake in fakes:
            breaks(fake, gated)
        tasks = [asyncio.create_task(ask(gateway, "key-f")) for _ in range(FLOOD)]
        await eventually(lambda: all(fake.running for fake in fakes))
        await fakes[0].stop()
        fakes[1].gate.set()
        assert {status for status, _, _ in await asyncio.gather(*tasks)} == {200}


async def test_without_keys_nobody_waits(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        breaks(one, gated)
        tasks = [asyncio.create_task(gateway.complete(prompt=f"p{number}")) for number in range(FLOOD)]
        await eventually(lambda: one.running == FLOOD)
        one.gate.set()
        assert {status for status, _, _ in await asyncio.gather(*tasks)} == {200}
