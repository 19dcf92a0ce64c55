"""Pickers that share a lease, as they are shipped: `preble epp --lease`, processes, every time as it is by default."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from gateway.fakes import replicas
from kubernetes.conftest import Cluster
from support.commands import Running
from support.waiting import eventually

pytestmark = pytest.mark.slow

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
NOT_ASKED = "this picker does not hold the lease"


class Standing(NamedTuple):
    """What one picker says of itself. `ready`: of HTTP; `health`: of gRPC; `leading`: its metric."""

    ready: tuple[int, str]
    health: int
    leading: float


LEADS = Standing((200, "ready"), SERVING, 1.0)
WAITS = Standing((503, NOT_ASKED), NOT_SERVING, 0.0)


class Picker:
    """A process that has begun to listen."""

    def __init__(self, process: Running, url: str, port: str) -> None:
        self.process = process
        self._url = url
        self._port = port

    async def standing(self) -> Standing:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._port}") as channel:
            health = (await HealthStub(channel).Check(HealthCheckRequest(service="readiness"))).status
        status, page = await asyncio.to_thread(_page, f"{self._url}/ready")
        _, metrics = await asyncio.to_thread(_page, f"{self._url}/metrics")
        [leading] = re.findall(r"^preble_picker_leading (\S+)$", metrics, re.MULTILINE)
        return Standing((status, json.loads(page)["status"]), health, float(leading))

    async def until(self, wanted: Standing) -> None:
        async def is_so() -> bool:
            return await self.standing() == wanted

        await eventually(is_so, f"{wanted}\n{''.join(self.process.lines)}")


def _page(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


Start = Callable[[], Any]


@pytest.fixture
def started() -> Iterator[list[Running]]:
    processes: list[Running] = []
    yield processes
    for process in processes:
        process.kill()


@asynccontextmanager
async def pickers(cluster: Cluster, folder: Path, started: list[Running]) -> AsyncIterator[Start]:
    """Pickers of one replica, started one by one."""
    async with replicas(1) as [fake]:
        config = folder / "preble.toml"
        config.write_text(f'engine = "openai"\n[discovery]\nkubeconfig = "{cluster.kubeconfig}"\n')

        async def start() -> Picker:
            where = ("--config", str(config), "--replica", fake.url, "--port", "0", "--grpc-port", "0")
            process = Running("epp", *where, "--lease", "epp", "--namespace", cluster.namespace)
            started.append(process)
            said = await asyncio.to_thread(process.wait_for, r"listening on (\S+) with pages, and on port (\d+)")
            return Picker(process, said[1], said[2])

        yield start


async def test_one_leads_and_another_one_follows_when_it_is_killed_or_ends(
    cluster: Cluster, tmp_path: Path, started: list[Running]
) -> None:
    async with pickers(cluster, tmp_path, started) as start:
        first = await start()
        await first.until(LEADS)
        second = await start()
        await second.until(WAITS)
        first.process.process.kill()
        await second.until(LEADS)
        third = await start()
        await third.until(WAITS)
        second.process.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(second.process.end) == 0
        await third.until(LEADS)
        third.process.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(third.process.end) == 0
        lease = await cluster.get("leases", "epp")
        assert "holderIdentity" not in lease["spec"], "given back"
        assert lease["spec"]["leaseTransitions"] == 2
        spoken = [line for process in (second, third) for line in process.process.lines if "warning" in line.lower()]
        assert [line for line in spoken if "lease" in line] == []
