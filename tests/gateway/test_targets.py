"""A client asks for a time to the first token: kept, refused at once with the time to come again, or served as it
comes."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.conftest import Serve, Served
from gateway.fakes import gated, replicas
from preble.config import ReplicaConfig, TargetsConfig
from preble.config.keys import KeyConfig
from preble.core.types import NO_TARGET, Target
from preble.emulator.config import EmulatorConfig
from preble.emulator.server import EmulatorServer
from preble.errors import RequestError
from preble.rules.callers import ANYBODY, Caller
from preble.serving.terms import TOKENS_PER_S, TPOT_TARGETS, TTFT_TARGETS, target_of
from support.gateways import gateway_before, idle
from support.waiting import eventually

HOW_TO = Path(__file__).parents[2] / "docs" / "howto" / "targets.md"

LONG, SHORT = list(range(50_000)), list(range(100_000, 100_100))
"""Prompts whose prefill takes 5 s and 10 ms, as the gateway estimates."""
KEY = KeyConfig("0" * 64, ttft_ms=800.0, least_ttft_ms=300.0, least_tpot_ms=20.0)
MODEL = TargetsConfig(ttft_ms=900.0, tpot_ms=15.0, least_ttft_ms=400.0)


async def ask(
    gateway: Served, prompt: list[int], target_ms: float | None = None, **fields: Any
) -> tuple[int, Any, Any]:
    headers = {} if target_ms is None else {"x-preble-ttft-ms": str(target_ms)}
    body = {"model": "tiny", "prompt": prompt, **fields}
    async with gateway.http.post("/v1/completions", json=body, headers=headers) as answer:
        await answer.read()
        return answer.status, answer.headers, await (answer.text() if fields.get("stream") else answer.json())


async def outcomes(gateway: Served) -> dict[str, float]:
    return outcomes_in(await gateway.metrics())


def outcomes_in(metrics: str) -> dict[str, float]:
    """How many targets of the time to the first token there were of each outcome."""
    lines = [line for line in metrics.splitlines() if line.startswith("preble_targets_total{")]
    assert all('target="ttft"' in line and 'model="tiny' in line for line in lines)
    return {line.split('outcome="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


async def test_a_target_that_no_replica_can_keep_is_refused_until_one_can(serve: Serve) -> None:
    async with replicas(1, max_model_len=100_000) as [fake], serve([fake]) as gateway:
        fake.script.extend([gated] * 3)
        long = asyncio.create_task(ask(gateway, LONG))
        await eventually(lambda: fake.requests)
        status, headers, body = await ask(gateway, SHORT, 500.0)
        assert status == 429
        assert 4 <= int(headers["retry-after"]) <= 6
        assert "4." in body["error"]["message"] or "5." in body["error"]["message"]
        assert await outcomes(gateway) == {"refused": 1}
        fake.gate.set()
        assert (await long)[0] == 200
        assert (await ask(gateway, SHORT, 500.0, stream=True))[0] == 200
        assert await outcomes(gateway) == {"refused": 1, "kept": 1}


async def test_what_the_how_to_shows_happens_on_an_emulated_replica() -> None:
    """The request that a reader copies is kept, given a minute, for this machine may be slow. While a long prompt is
    computed it is refused as it stands."""
    page = HOW_TO.read_text(encoding="utf-8")
    shown = re.search(
        r"curl -i http://[^/]+(?P<path>\S+) .*?-H '(?P<name>x-[\w-]+): (?P<ms>\d+)'.*?-d '(?P<body>.*?)'", page, re.S
    )
    assert shown is not None
    sent: dict[str, Any] = {
        "data": shown["body"],
        "headers": {"content-type": "application/json", shown["name"]: shown["ms"]},
    }
    patient = sent | {"headers": sent["headers"] | {shown["name"]: "60000"}}
    async with (
        EmulatorServer(EmulatorConfig(profile="tiny-cpu", kv_tokens=2**17)) as server,
        gateway_before([ReplicaConfig(server.url)]) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):

        async def metrics() -> str:
            async with http.get("/metrics") as answer:
                return await answer.text()

        async with http.post(shown["path"], **patient) as answer:
            assert answer.status == 200 and float(answer.headers["x-preble-predicted-ttft-ms"]) > 0
            assert "data: [DONE]" in await answer.text()
        await eventually(lambda: gateway.serving.num_in_flight == 0)
        assert outcomes_in(await metrics()) == {"kept": 1}
        long = asyncio.create_task(http.post(shown["path"], json={"prompt": LONG}))
        await eventually(lambda: gateway.serving.num_in_flight == 1)
        async with http.post(shown["path"], **sent) as answer:
            assert answer.status == 429 and int(answer.headers["retry-after"]) >= 1
            assert "no replica can keep this request's target now; perhaps in" in await answer.text()
        assert outcomes_in(await metrics()) == {"kept": 1, "refused": 1}
        long.cancel()
        await idle(gateway)


async def test_a_target_that_no_idle_replica_could_keep_is_served_as_it_comes(serve: Serve) -> None:
    async with replicas(1, max_model_len=100_000) as [fake], serve([fake]) as gateway:
        assert (await ask(gateway, LONG, 500.0))[0] == 200


async def test_a_target_that_no_idle_replica_could_keep_is_refused_while_others_wait(serve: Serve) -> None:
    """It comes later still then, and others behind it that could be promised something."""
    async with replicas(1, max_model_len=100_000) as [fake], serve([fake]) as gateway:
        fake.script.append(gated)
        first = asyncio.create_task(ask(gateway, LONG))
        await eventually(lambda: fake.requests)
        status, headers, _ = await ask(gateway, LONG[::-1], 500.0)
        assert status == 429 and 4 <= int(headers["retry-after"]) <= 6, "when the first is done, not when it would fit"
        fake.gate.set()
        assert (await first)[0] == 200
        assert (await ask(gateway, LONG[::-1], 500.0))[0] == 200


@pytest.mark.parametrize("fields", [{}, {"model": None}])
async def test_a_model_has_a_target_for_requests_that_name_none(serve: Serve, fields: dict[str, Any]) -> None:
    """Also where they do not name the model: there is one."""
    targets = {"tiny": TargetsConfig(ttft_ms=500.0), "other": TargetsConfig(ttft_ms=60_000.0)}
    async with replicas(1, max_model_len=100_000) as [fake], serve([fake], models=targets) as gateway:
        fake.script.append(gated)
        long = asyncio.create_task(ask(gateway, LONG, 60_000.0))
        await eventually(lambda: fake.requests)
        assert (await ask(gateway, SHORT, **fields))[0] == 429
        fake.gate.set()
        assert (await long)[0] == 200
        assert (await ask(gateway, SHORT, **fields))[0] == 200


async def test_without_a_target_nothing_is_refused(serve: Serve) -> None:
    async with replicas(1, max_model_len=100_000) as [fake], serve([fake]) as gateway:
        fake.script.extend([gated] * 3)
        asked = [asyncio.create_task(ask(gateway, LONG)) for _ in range(3)]
        await eventually(lambda: len(fake.requests) == 3)
        fake.gate.set()
        assert [status for status, _, _ in await asyncio.gather(*asked)] == [200, 200, 200]
        assert await outcomes(gateway) == {}


async def test_what_has_no_target_lets_go_who_has_one_without_any_keys(serve: Serve) -> None:
    async with replicas(1, max_model_len=100_000) as [fake], serve([fake]) as gateway:
        fake.script.extend([gated] * 3)
        first = asyncio.create_task(ask(gateway, SHORT, 60_000.0))
        await eventually(lambda: fake.requests)
        batch = [asyncio.create_task(ask(gateway, LONG)) for _ in range(3)]
        await eventually(lambda: gateway.gateway.serving.num_waiting == 2)  # one fills the replica
        urgent = asyncio.create_task(ask(gateway, SHORT[1:], 20_000.0))
        await eventually(lambda: gateway.gateway.serving.num_waiting == 3)
        fake.gate.set()
        assert all(status == 200 for status, _, _ in await asyncio.gather(first, urgent, *batch))
        lengths = [len(body["prompt"]) for body in fake.requests]
        assert lengths == [100, 50_000, 99, 50_000, 50_000]


@pytest.mark.parametrize("name", [*TTFT_TARGETS, *TPOT_TARGETS, TOKENS_PER_S])
@pytest.mark.parametrize("value", [b"soon", b"-1", b"0", b"nan", b"inf", b"1e30", b"\xff"])
def test_a_header_that_is_not_a_number_above_0_is_refused(name: bytes, value: bytes) -> None:
    with pytest.raises(RequestError, match=name.decode()):
        target_of({name: value}, ANYBODY)


async def test_a_wrong_target_is_the_clients_error(serve: Serve) -> None:
    async with (
        replicas(1) as [fake],
        serve([fake]) as gateway,
        gateway.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-preble-ttft-ms": "x"}) as answer,
    ):
        assert answer.status == 400
        assert "x-preble-ttft-ms" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "key", "model", "target"),
    [
        ({}, None, None, NO_TARGET),
        ({b"x-preble-ttft-ms": b"500"}, None, None, Target(0.5, None)),
        ({b"x-llm-d-slo-ttft-ms": b"500", b"x-llm-d-slo-tpot-ms": b"40"}, None, None, Target(0.5, 0.04)),
        ({b"x-sgl-ttft-slo-ms": b"250", b"x-sgl-tps-slo": b"50"}, None, None, Target(0.25, 0.02)),
        ({b"x-preble-ttft-ms": b"500", b"x-sgl-ttft-slo-ms": b"250"}, None, None, Target(0.5, None)),
        ({}, KEY, None, Target(0.8, None)),
        ({b"x-preble-ttft-ms": b"100"}, KEY, None, Target(0.3, None)),
        ({b"x-preble-ttft-ms": b"900", b"x-preble-tpot-ms": b"10"}, KEY, None, Target(0.9, 0.02)),
        ({}, None, MODEL, Target(0.9, 0.015)),
        ({}, KEY, MODEL, Target(0.8, 0.02)),
        ({b"x-preble-ttft-ms": b"100"}, None, MODEL, Target(0.4, 0.015)),
        ({b"x-preble-ttft-ms": b"100"}, KEY, MODEL, Target(0.4, 0.02)),
    ],
)
def test_the_target_is_the_headers_else_the_keys_else_the_models_and_no_shorter_than_both_allow(
    headers: dict[bytes, bytes], key: KeyConfig | None, model: TargetsConfig | None, target: Target
) -> None:
    assert target_of(headers, Caller(name="k", tenant="k", limits=key), model) == target
