"""What engines say of their own load, as the gateway shows it: the other clients of a replica are in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from gateway.conftest import Serve, Served
from gateway.fakes import FakeReplica, gated, replicas
from support.kv_publisher import ScriptedPublisher
from support.waiting import eventually


@asynccontextmanager
async def pushing_replica(publisher: ScriptedPublisher) -> AsyncIterator[FakeReplica]:
    """A replica that says what SGLang says, and that its load is pushed by this publisher."""
    port = int(publisher.endpoints.endpoint.rpartition(":")[2])
    source = {"publisher": "zmq", "endpoint_port_base": 1, "load_endpoint_port_base": port, "load_topic": "load"}
    fake = FakeReplica([{"id": "tiny", "owned_by": "sglang", "max_model_len": 8192}])
    fake.pages = {"/server_info": {"enable_cache_report": True, "kv_events": source}, "/v1/loads": {}}
    await fake.start()
    try:
        yield fake
    finally:
        await fake.stop()


async def push(publisher: ScriptedPublisher, running: int, waiting: int, kv_tokens: int) -> None:
    payload = msgspec.msgpack.encode(["LoadStat", running, waiting, kv_tokens, 65_536, 0])
    await publisher.send(b"load", bytes(8), payload)


async def replica_page(gateway: Served) -> dict[str, Any]:
    async with gateway.http.get("/debug/replicas") as answer:
        [page] = (await answer.json())["replicas"]
    return dict(page)


async def test_a_pushed_load_stands_beside_what_the_gateway_has_in_flight(serve: Serve) -> None:
    async with (
        ScriptedPublisher() as publisher,
        pushing_replica(publisher) as one,
        serve([one], engine="auto") as gateway,
    ):
        assert (await replica_page(gateway))["engine_load"] is None
        [live] = gateway.gateway.serving.replicas.values()
        await publisher.subscribed()
        one.script.append(gated)
        request = asyncio.create_task(gateway.complete())
        await eventually(lambda: one.running == 1)
        await push(publisher, running=3, waiting=2, kv_tokens=700)
        await eventually(lambda: live.engine_load is not None)
        page = await replica_page(gateway)
        assert page["engine_load"] == {"running": 3, "waiting": 2, "kv_tokens": 700}
        assert page["in_flight"] == 1, "four are other clients'"
        metrics = await gateway.metrics()
        for name, value in (("running", 3), ("waiting", 2), ("kv_tokens", 700)):
            assert f'preble_engine_{name}{{replica="{one.url}"}} {value}.0' in metrics
        one.gate.set()
        assert (await request)[0] == 200


async def test_the_load_of_a_replica_that_is_gone_is_no_longer_told(serve: Serve) -> None:
    async with (
        ScriptedPublisher() as publisher,
        pushing_replica(publisher) as one,
        serve([one], engine="sglang") as gateway,
    ):
        await publisher.subscribed()
        await push(publisher, running=1, waiting=0, kv_tokens=100)
        [live] = gateway.gateway.serving.replicas.values()
        await eventually(lambda: live.engine_load is not None)
        await one.stop()
        await eventually(lambda: gateway.num_live == 0)
        assert "preble_engine_running{" not in await gateway.metrics()


async def test_a_replica_that_reports_nothing_has_no_load(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        assert (await replica_page(gateway))["engine_load"] is None
        assert "preble_engine_running{" not in await gateway.metrics()
