"""Requests of which replicas die, and requests that were only there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from gateway.conftest import Serve, Served
from gateway.fakes import FakeReplica, answer, gated, prompt_of, replicas
from preble.config import HealthConfig
from preble.rules import retries
from support.waiting import eventually


@pytest.fixture(autouse=True)
def fast_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes die one after the other within milliseconds, as nothing real does."""
    monkeypatch.setattr(retries, "ONE_INCIDENT_S", 0.0)  # ships 1 s


async def dies_of_it(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The whole replica ends if the prompt is deadly, as SGLang does."""
    if "deadly" not in prompt_of(body):
        return await answer(replica, request, body)
    stopping = asyncio.get_running_loop().create_task(replica.stop())
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.shield(stopping)
    raise AssertionError("unreachable")


async def asked(gateway: Served, prompt: str) -> tuple[int, str | None]:
    status, body, _ = await gateway.complete(prompt=prompt)
    return status, body.get("error", {}).get("code")


def sent(replica: FakeReplica) -> list[str]:
    return [prompt_of(body) for body in replica.requests]


async def test_a_request_of_which_two_replicas_have_died_reaches_no_third(serve: Serve) -> None:
    async with replicas(4) as fakes, serve(fakes) as gateway:
        for fake in fakes:
            fake.script.extend([dies_of_it] * 9)
        assert await asked(gateway, "deadly") == (502, "engine_gone")
        with capture_logs() as logs:
            for _ in range(3):  # as SDKs try again
                assert await asked(gateway, "deadly") == (400, "request_quarantined")
        assert sum(sent(fake).count("deadly") for fake in fakes) == 2
        [first, *_] = [entry for entry in logs if entry["event"] == "request_quarantined"]
        assert len(first["died"]) == 2
        assert await asked(gateway, "deadly too") == (502, "engine_gone"), "another one, of which nobody knows"
        assert sum(sent(fake).count("deadly too") for fake in fakes) == 2


async def test_a_request_of_which_the_only_replica_dies_each_time_it_is_back_is_refused(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one], health=HealthConfig(retry_min_s=0.01, retry_max_s=0.01)) as gateway:
        for _ in range(2):
            one.script.append(dies_of_it)
            assert (await asked(gateway, "deadly"))[0] in (502, 503)
            await eventually(lambda: not gateway.gateway.serving.replicas, "it has left")
            await one.start()
            await eventually(lambda: bool(gateway.gateway.serving.replicas), "it is back")
        assert await asked(gateway, "deadly") == (400, "request_quarantined")
        assert (await asked(gateway, "harmless"))[0] == 200


async def test_what_was_there_when_replicas_were_killed_is_answered_and_stays_welcome(serve: Serve) -> None:
    """Two of four are killed, one after the other, with requests that wait there."""
    prompts = [f"{number} has a prompt of its own" for number in range(24)]
    async with replicas(4) as fakes, serve(fakes) as gateway:
        for fake in fakes:
            fake.script.extend([gated] * 24)
        asking = [asyncio.create_task(asked(gateway, prompt)) for prompt in prompts]
        await eventually(lambda: sum(fake.running for fake in fakes) == len(prompts), "all of them wait")
        for fake in fakes[:2]:
            await fake.stop()
            await eventually(lambda: sum(f.running for f in fakes) == sum(not t.done() for t in asking), "they moved")
        for fake in fakes[2:]:
            fake.gate.set()
        statuses = [status for status, _ in await asyncio.gather(*asking)]
        twice_killed = [prompt for prompt in prompts if sum(prompt in sent(fake) for fake in fakes[:2]) == 2]
        lost = [prompt for prompt, status in zip(prompts, statuses, strict=True) if status != 200]
        assert lost == twice_killed, "a request moves once"
        for fake in fakes[2:]:
            fake.script.clear()
        assert [await asked(gateway, prompt) for prompt in prompts] == [(200, None)] * len(prompts)
