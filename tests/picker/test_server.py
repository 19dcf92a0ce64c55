"""The picker as a server: its health, its certificates, its settings, its end."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from gateway.fakes import replicas
from picker.conftest import Pick, Picking
from picker.gateway_by_hand import EVENTS, USAGE, GatewayByHand
from preble.config import GatewayConfig, PickerConfig, ReplicaConfig, TimeoutsConfig
from preble.errors import ConfigError
from preble.gateway.server import Gateway, serving
from preble.picker.endpoints import require_address
from preble.picker.server import READY, picking
from support.gateways import quick_config
from support.waiting import eventually

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def grpc_end_of(url: str) -> AsyncIterator[tuple[Gateway, Any, grpc.aio.Channel]]:
    """A gateway, its picker's context, which the test ends, and a channel that outlives it. Its grace has no end."""
    config = quick_config([url], picker=PickerConfig(port=0), timeouts=TimeoutsConfig(shutdown_s=3600.0))
    async with serving(config) as gateway:
        context = picking(gateway)
        picker = await context.__aenter__()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}") as channel:
            yield gateway, context, channel


async def health(picking: Picking, name: str) -> int:
    return (await HealthStub(picking.by_hand.channel).Check(HealthCheckRequest(service=name))).status


async def is_ready(picking: Picking) -> bool:
    said = {await health(picking, name) for name in READY}
    return said == {SERVING}


async def test_health_says_ready_from_the_first_replica_on(pick: Pick) -> None:
    async with replicas(1) as fakes:
        await fakes[0].stop()
        async with pick(fakes, live=0) as picking:
            assert [await health(picking, name) for name in ("", "liveness")] == [SERVING, SERVING]
            assert [await health(picking, name) for name in READY] == [NOT_SERVING, NOT_SERVING]
            await fakes[0].start()
            await eventually(lambda: is_ready(picking))
            await fakes[0].stop()
            await eventually(lambda: not picking.serving.replicas)
            assert await is_ready(picking), "it can say 503 itself"
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await health(picking, "something")
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_who_watches_a_health_hears_when_it_changes_until_the_picker_ends() -> None:
    async with replicas(1) as [fake], AsyncExitStack() as stack:
        await fake.stop()
        gateway, context, channel = await stack.enter_async_context(grpc_end_of(fake.url))
        watch = HealthStub(channel).Watch
        calls = {name: watch(HealthCheckRequest(service=name)) for name in ("", "readiness", "something")}
        heard = {name: (await call.read()).status for name, call in calls.items()}
        assert heard == {"": SERVING, "readiness": NOT_SERVING, "something": HealthCheckResponse.SERVICE_UNKNOWN}
        await fake.start()
        assert (await calls["readiness"].read()).status == SERVING
        gateway.drain()
        assert (await calls["readiness"].read()).status == NOT_SERVING
        calls["something"].cancel()
        await context.__aexit__(None, None, None)
        assert {await calls[name].code() for name in ("", "readiness")} == {grpc.StatusCode.UNAVAILABLE}


async def test_a_picker_that_drains_is_not_ready_and_serves_on(pick: Pick) -> None:
    async with replicas(1) as fakes, pick(fakes) as picking:
        assert await is_ready(picking)
        exchange = picking.exchange()
        await exchange.placed()
        picking.gateway.drain()
        assert not await is_ready(picking)
        await exchange.answer([*EVENTS, USAGE])
        assert picking.decision().outcome == "ok"


async def test_the_end_waits_for_running_requests(pick: Pick) -> None:
    async with replicas(1) as fakes, grpc_end_of(fakes[0].url) as (gateway, context, channel):
        await eventually(lambda: bool(gateway.serving.replicas))
        exchange = GatewayByHand(channel).exchange()
        await exchange.placed()
        end = asyncio.create_task(context.__aexit__(None, None, None))
        await exchange.answer_head()
        assert not end.done()
        await exchange.answer_piece(USAGE, ends=True)
        await exchange.close()
        await end
        assert next(iter(gateway.serving.recent.latest(1))).outcome == "ok"


@pytest.mark.parametrize("url", ["http://gpu1:8000", "https://10.0.0.1:8000", "http://10.0.0.1", "http://10.0.0.1:1/x"])
def test_replicas_need_an_address_and_a_port(url: str) -> None:
    with pytest.raises(ConfigError, match="gateways are sent to"):
        require_address(url)


async def unusable(**settings: Any) -> str:
    config = GatewayConfig(port=0, replicas=(ReplicaConfig("http://127.0.0.1:9"),), picker=PickerConfig(**settings))
    async with serving(config) as gateway:
        with pytest.raises(ConfigError) as error:
            async with picking(gateway):
                pass
    return str(error.value)


async def test_unusable_settings_say_what_to_do(pick: Pick, tmp_path: Path) -> None:
    assert "give both" in await unusable(port=0, tls_cert="a.pem")
    assert "tls_key" in await unusable(port=0, tls_cert=str(tmp_path / "a"), tls_key=str(tmp_path / "b"))
    async with replicas(1) as fakes, pick(fakes) as picking:
        assert "choose another port" in await unusable(port=picking.picker.port)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
async def test_gateways_may_ask_through_tls(pick: Pick, tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    argv += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    await asyncio.to_thread(subprocess.run, argv, check=True, capture_output=True)
    async with replicas(1) as fakes:
        settings = PickerConfig(port=0, tls_cert=str(cert), tls_key=str(key))
        async with pick(fakes, picker=settings) as picking:
            credentials = grpc.ssl_channel_credentials(cert.read_bytes())
            async with grpc.aio.secure_channel(f"localhost:{picking.picker.port}", credentials) as channel:
                exchange = GatewayByHand(channel).exchange()
                await exchange.placed()
                await exchange.answer([*EVENTS, USAGE])
