"""Tenants take turns: a flood of one waits in the gateway, and the others go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.conftest import Serve, Served
from gateway.fakes import FakeReplica, gated, replicas, status
from gateway.test_ejection import breaks
from gateway.test_tenants import table
from preble.config import AuthConfig, EjectionConfig
from preble.core.types import ReplicaId
from preble.rules.ejection import Standing
from support.waiting import eventually

FLOOD = 20


@pytest.fixture
def auth(tmp_path: Path) -> AuthConfig:
    path = tmp_path / "keys.toml"
    path.write_text(
        table("flood", "key-f")
        + table("other", "key-o")
        + table("some", "key-s", tokens_per_minute=9000)
        + table("jobs", "key-j", tenant="flood", priority="batch")
        + table("root", "key-r", admin=True)
    )
    return AuthConfig(keys_file=str(path))


async def ask(
    gateway: Served, key: str, tier: str | None = None, **headers: str
) -> tuple[int, dict[str, Any], str | None]:
    body = {"model": "tiny", "prompt": f"{key} asks " + "something long " * 100, "stream": True, "service_tier": tier}
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
        assert (await ask(gateway, "key-o"))[0] == 200
        flood = await flooded(gateway, one)
        before = asked_by(one, "key-f")
        other = asyncio.create_task(ask(gateway, "key-o"))
        await eventually(lambda: asked_by(one, "key-o") == 2)
        assert asked_by(one, "key-f") == before
        metrics = await gateway.metrics("key-r")
        assert f'preble_prompts_queued{{model="tiny"}} {float(FLOOD - before)}' in metrics
        assert 'preble_work_waiting_seconds{model="tiny"} ' in metrics
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


@pytest.mark.parametrize(
    ("key", "tier", "headers"),
    [
        ("key-f", None, {"x_preble_priority": "batch"}),
        ("key-f", "batch", {}),
        ("key-f", "flex", {}),
        ("key-f", "interactive", {"x_preble_priority": "batch"}),
        ("key-j", "default", {}),
        ("key-j", None, {"x_preble_priority": "interactive"}),
    ],
    ids=["header", "field", "OpenAI's tier", "header before field", "key", "no better than the key's"],
)
async def test_a_batch_waits_for_people(
    serve: Serve, auth: AuthConfig, key: str, tier: str | None, headers: dict[str, str]
) -> None:
    async with replicas(1) as [one], serve([one], auth=auth) as gateway:
        flood = await flooded(gateway, one)
        waiting = gateway.gateway.serving
        before = waiting.num_waiting
        batch = asyncio.create_task(ask(gateway, key, tier, x_request_id="batch", **headers))
        await eventually(lambda: waiting.num_waiting == before + 1)
        urgent = asyncio.create_task(ask(gateway, "key-f", "auto", x_request_id="urgent"))
        await eventually(lambda: waiting.num_waiting == before + 2)
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


async def test_a_replica_that_is_ejected_is_no_room(serve: Serve, auth: AuthConfig) -> None:
    ejection = EjectionConfig(first_out_s=1000.0, longest_out_s=1000.0)
    async with replicas(2) as [bad, good], serve([bad, good], auth=auth, ejection=ejection) as gateway:
        breaks(bad, status(500))
        for _ in range(2 * ejection.consecutive_failures):
            await ask(gateway, "key-o")
        assert gateway.gateway.serving.standing(ReplicaId(bad.url)) is Standing.EJECTED
        flood = await flooded(gateway, good)
        good.gate.set()
        assert {answer[0] for answer in await asyncio.gather(*flood)} == {200}


async def test_a_replica_that_cannot_hold_the_prompt_is_no_room(serve: Serve, auth: AuthConfig) -> None:
    async with (
        replicas(1) as [large],
        replicas(1, max_model_len=50) as [small],
        serve([large, small], auth=auth) as gateway,
    ):
        flood = await flooded(gateway, large)
        large.gate.set()
        assert {answer[0] for answer in await asyncio.gather(*flood)} == {200}


async def test_what_waits_goes_to_a_replica_that_joins_later(serve: Serve, auth: AuthConfig) -> None:
    async with replicas(2) as [one, later]:
        await later.stop()
        async with serve([one, later], live=1, auth=auth) as gateway:
            flood = await flooded(gateway, one)
            breaks(later, gated)
            await later.start()
            await eventually(lambda: later.running > 0)
            for fake in (one, later):
                fake.gate.set()
            await asyncio.gather(*flood)


async def test_what_is_not_served_costs_the_key_no_tokens(serve: Serve, auth: AuthConfig) -> None:
    async with replicas(1) as [one], serve([one], auth=auth) as gateway:
        body = {"model": "tiny", "prompt": "x" * 8500}  # more than the model's context, less than the key's allowance
        for _ in range(3):
            async with gateway.http.post("/v1/completions", json=body, headers={"x-api-key": "key-s"}) as answer:
                assert answer.status == 400
        assert (await ask(gateway, "key-s"))[0] == 200
