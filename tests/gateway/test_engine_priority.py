"""The class of a request reaches engines that order by it, and nobody else's `priority` does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import pytest

from gateway.conftest import Serve
from gateway.fakes import replicas
from preble.config import ReplicaConfig
from preble.engines.adapter import PriorityOrder
from preble.engines.starting.launch import Fleet
from support.gateways import gateway_before
from support.questions import Replica, SglangReplica, VllmReplica, prompt_of, session
from support.replicas import (
    KV_TOKENS,
    MODEL_NAME,
    SGLANG,
    TEST_TIMEOUT_S,
    RunningReplicas,
    options_of_one,
    require_sglang,
    running,
)
from support.waiting import eventually

LOWER_FIRST, HIGHER_FIRST = PriorityOrder(1), PriorityOrder(-1, is_required=True)
PATHS = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("order", "name", "sent"),
    [
        (None, "batch", None),
        (LOWER_FIRST, None, None),
        (LOWER_FIRST, "interactive", None),
        (LOWER_FIRST, "batch", 1),
        (HIGHER_FIRST, None, 0),
        (HIGHER_FIRST, "batch", -1),
    ],
)
async def test_the_class_is_written_as_the_engine_orders_by_it(
    serve: Serve, path: str, order: PriorityOrder | None, name: str | None, sent: int | None
) -> None:
    async with replicas(1) as [fake], serve([fake]) as gateway:
        for live in gateway.gateway.serving.replicas.values():
            live.info = replace(live.info, priority=order)
        headers = {} if name is None else {"x-preble-priority": name}
        async with gateway.http.post(path, json={"model": "tiny", **PATHS[path]}, headers=headers) as answer:
            assert answer.status == 200
        assert fake.requests[-1].get("priority") == sent


async def test_what_asks_for_no_answer_gets_no_priority(serve: Serve) -> None:
    async with replicas(1) as [fake], serve([fake]) as gateway:
        for live in gateway.gateway.serving.replicas.values():
            live.info = replace(live.info, priority=HIGHER_FIRST)
        async with gateway.http.post("/v1/embeddings", json={"model": "tiny", "input": "hello"}) as answer:
            await answer.read()
        assert all("priority" not in body for body in fake.requests)


# -- real engines -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sglang_by_priority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningReplicas]:
    """A real SGLang that orders by priority: the shared one orders as Preble does."""
    require_sglang()
    flags = ("--enable-priority-scheduling", "--disable-priority-preemption")
    fleet = Fleet(options_of_one("sglang", SGLANG, tmp_path_factory.mktemp("sglang-logs"), extra_args=flags))
    with running(fleet) as loop:
        yield RunningReplicas(fleet.replicas, loop)


BY_PRIORITY = pytest.mark.parametrize(
    ("kind", "engine"),
    [
        pytest.param(VllmReplica, "vllm_pair", marks=pytest.mark.vllm, id="vllm"),
        pytest.param(SglangReplica, "sglang_by_priority", marks=pytest.mark.sglang, id="sglang"),
    ],
)


@pytest.mark.timeout(TEST_TIMEOUT_S)
@BY_PRIORITY
async def test_an_interactive_request_passes_batch_work_that_waits_in_a_real_engine(
    request: pytest.FixtureRequest, kind: type[Replica], engine: str
) -> None:
    """The memory has room for one of the prompts at once, so the others wait. While they do, a target shorter than
    their prefill is refused at once, and the same request without a target is served.
    """
    url = request.getfixturevalue(engine).urls[0]
    done: list[str] = []

    async def ask(http: aiohttp.ClientSession, number: int, label: str, tokens: int) -> None:
        prompt = prompt_of(number, KV_TOKENS * 5 // 8)
        body: dict[str, Any] = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens}
        headers = {"x-preble-priority": label}
        async with http.post("/v1/completions", json={**body, "ignore_eos": True}, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
        done.append(label)

    async def is_behind(replica: Replica) -> bool:
        return await replica.num_waiting() >= 3

    async def is_refused(http: aiohttp.ClientSession, target_s: float) -> None:
        """Prompts wait, each five eighths as long as what the target would let be computed. Asked last: after a target
        others would wait in the gateway."""
        body = {"model": MODEL_NAME, "prompt": "hello", "max_tokens": 1}
        async with http.post(
            "/v1/completions", json=body, headers={"x-preble-ttft-ms": f"{1000 * target_s}"}
        ) as answer:
            assert answer.status == 429, await answer.text()
            said = re.search(r"perhaps in ([\d.]+) s", (await answer.json())["error"]["message"])
            assert said is not None and int(answer.headers["retry-after"]) >= max(float(said[1]), 1)

    async with session() as direct, gateway_before([ReplicaConfig(url)]) as gateway:
        replica = kind(url, direct)
        await replica.emptied()
        async with aiohttp.ClientSession(gateway.url) as http:
            async with asyncio.TaskGroup() as tasks:
                for number in range(1, 6):
                    tasks.create_task(ask(http, number, "batch", 700))
                await eventually(partial(is_behind, replica))
                tasks.create_task(ask(http, 6, "interactive", 5))
                await eventually(lambda: gateway.serving.num_in_flight == 6 or bool(done))
                await is_refused(http, gateway.serving.scheduler.cost_model.prefill_s(KV_TOKENS))
            assert done[-1] == "batch", "it passed what waited; the first to come would have been served first"
            for wanted in ({"priority": -9}, {"priority": 9}):
                async with http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "a", **wanted}) as answer:
                    assert answer.status == 400 and "set by routers only" in await answer.text()


@pytest.mark.timeout(TEST_TIMEOUT_S)
@BY_PRIORITY
async def test_a_real_engine_keeps_a_target(request: pytest.FixtureRequest, kind: type[Replica], engine: str) -> None:
    """None is refused here: which target a busy engine cannot keep depends on the machine."""
    url = request.getfixturevalue(engine).urls[0]
    async with gateway_before([ReplicaConfig(url)]) as gateway, aiohttp.ClientSession(gateway.url) as http:
        body = {"model": MODEL_NAME, "prompt": "hello", "max_tokens": 3, "stream": True}
        async with http.post("/v1/completions", json=body, headers={"x-preble-ttft-ms": "60000"}) as answer:
            assert answer.status == 200 and float(answer.headers["x-preble-predicted-ttft-ms"]) > 0
            await answer.read()
        async with http.get("/metrics") as answer:
            counted = [line for line in (await answer.text()).splitlines() if line.startswith("preble_targets_total{")]
        assert ['outcome="kept"' in line and line.endswith(" 1.0") for line in counted] == [True]


@pytest.mark.vllm
@pytest.mark.timeout(TEST_TIMEOUT_S)
async def test_vllm_that_orders_by_no_priority_takes_one_and_ignores_it(vllm_pair: RunningReplicas) -> None:
    async with (
        gateway_before([ReplicaConfig(vllm_pair.urls[1])]) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        body = {"model": MODEL_NAME, "prompt": "hello", "max_tokens": 3}
        async with http.post("/v1/completions", json=body, headers={"x-preble-priority": "batch"}) as answer:
            assert answer.status == 200
