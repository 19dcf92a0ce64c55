"""SIGUSR2 starts a gateway's successor on its sockets, from the files that are installed by then; then it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs
from yarl import URL

from gateway.fakes import FakeReplica, gated, replicas
from preble.config import GatewayConfig
from preble.gateway import handover
from preble.gateway.handover import Upgrade
from support.load import load
from support.processes import tree
from support.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
DRAIN_S = 0.2
CONFIG = """
workers = {workers}
replicas = ["{url}"]
engine = "openai"
policy = "{policy}"
port = 0
[timeouts]
drain_s = {drain_s}
shutdown_s = 0.1
[parity]
enabled = false
"""


class Gateway:
    """What one command has started: a process, and its successors."""

    def __init__(self, pid: int, log: Path) -> None:
        self.first, self.log = pid, log

    def logged(self, pattern: str) -> list[str]:
        return re.findall(pattern, self.log.read_text(encoding="utf-8"))

    @property
    def pids(self) -> list[int]:
        return [self.first, *map(int, self.logged(r'"successor":(\d+)'))]

    @property
    def url(self) -> str:
        return self.logged(r"preble serve: listening on (\S+)")[-1]

    def client(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(self.url, headers={"connection": "keep-alive"})

    async def policy(self) -> str:
        async with self.client() as http, http.get("/metrics") as answer:
            [policy] = re.findall(r'preble_build_info\{.*policy="(\w+)"', await answer.text())
            return str(policy)

    async def upgrade(self) -> None:
        """Return once the successor serves."""
        before = len(self.pids)
        os.kill(self.pids[-1], signal.SIGUSR2)
        await eventually(lambda: len(self.pids) == before + 1)


def write(folder: Path, fake: FakeReplica, workers: int, policy: str) -> Path:
    config = folder / "preble.toml"
    config.write_text(CONFIG.format(drain_s=DRAIN_S, workers=workers, url=fake.url, policy=policy), encoding="utf-8")
    return config


@asynccontextmanager
async def running(folder: Path, fake: FakeReplica, workers: int, **environ: str) -> AsyncIterator[Gateway]:
    config, log = write(folder, fake, workers, "round_robin"), folder / "log.txt"
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "preble", "serve", "--config", str(config), "--log-format", "json"),
            stdout=stderr,
            stderr=stderr,
            env={**os.environ, **environ},
        )
    gateway = Gateway(process.pid, log)
    try:
        await eventually(lambda: bool(gateway.logged("listening on")) or process.returncode is not None)
        await eventually(lambda: is_served(gateway))
        yield gateway
    finally:
        for pid in gateway.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await process.wait()


async def is_served(gateway: Gateway) -> bool:
    async with gateway.client() as http, http.post("/v1/completions", json={"prompt": "a"}) as answer:
        return answer.status == 200


def has_ended(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


@pytest.mark.parametrize("workers", [(0, 0), (2, 2), (2, 0), (1, 3)])
async def test_an_upgrade_loses_no_request_and_uses_what_is_installed_by_then(
    tmp_path: Path, workers: tuple[int, int]
) -> None:
    before, after = workers
    async with replicas(1) as [fake], running(tmp_path, fake, before) as gateway, gateway.client() as http:
        fake.script.append(gated)
        held = asyncio.create_task(http.post("/v1/completions", json={"prompt": "held"}))
        await eventually(lambda: fake.running == 1)
        async with load(gateway.client) as clients:
            await clients.some_more()
            write(tmp_path, fake, after, "least_load")
            await gateway.upgrade()
            await clients.some_more(40)
            assert await gateway.policy() == "least_load"
            write(tmp_path, fake, before, "preble")
            await gateway.upgrade()
            await clients.some_more(40)
            await eventually(lambda: has_ended(gateway.pids[1]))
        assert clients.wrong == []
        assert await gateway.policy() == "preble"
        assert not has_ended(gateway.first), "an answer may take longer than `timeouts.shutdown_s`"
        fake.gate.set()
        async with await held as answer:
            assert answer.status == 200
        await eventually(lambda: has_ended(gateway.first))
        assert gateway.logged("Traceback") == []


async def test_a_gateway_that_leaves_does_not_close_the_idle_connection_of_a_client(tmp_path: Path) -> None:
    """The client may be sending a request there."""
    ask = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 15\r\n\r\n" + b'{"prompt": "a"}'
    async with replicas(1) as [fake], running(tmp_path, fake, 0) as gateway:
        url = URL(gateway.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(ask)
        assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n")
        fake.script.append(gated)
        async with gateway.client() as http:
            held = asyncio.create_task(http.post("/v1/completions", json={"prompt": "held"}))
            await eventually(lambda: fake.running == 1)
            await gateway.upgrade()
            fake.gate.set()
            async with await held as answer:
                assert answer.status == 200
                assert answer.headers["connection"] == "close"
        await asyncio.sleep(
            2 * DRAIN_S
        )  # until it would close it, of which nothing tells; a shorter wait fails nothing
        writer.write(ask)
        assert b"connection: close" in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await eventually(lambda: has_ended(gateway.first))


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_successor_that_does_not_serve_changes_nothing(tmp_path: Path, workers: int) -> None:
    async with replicas(1) as [fake], running(tmp_path, fake, workers) as gateway:
        async with load(gateway.client) as clients:
            write(tmp_path, fake, workers, "nonsense")
            os.kill(gateway.first, signal.SIGUSR2)
            await eventually(lambda: len(gateway.logged("upgrade_failed")) == 1)
            assert gateway.logged("ended with status 2") and gateway.logged("nonsense")
            await clients.some_more(40)
            assert await gateway.policy() == "round_robin"
            write(tmp_path, fake, workers, "preble")
            await gateway.upgrade()
            await clients.some_more(40)
        assert clients.wrong == []


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_stop_during_an_upgrade_ends_both(tmp_path: Path, workers: int) -> None:
    async with replicas(1) as [fake], running(tmp_path, fake, workers) as gateway:
        own = tree(gateway.first)
        os.kill(gateway.first, signal.SIGUSR2)
        await eventually(lambda: len(tree(gateway.first)) > len(own))
        pids = tree(gateway.first)
        os.kill(gateway.first, signal.SIGTERM)
        await eventually(lambda: all(map(has_ended, pids)))
        assert gateway.logged("Traceback") == []


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_stop_after_a_handover_lets_running_requests_end_and_a_second_one_does_not(
    tmp_path: Path, workers: int
) -> None:
    grace = {"PREBLE_TIMEOUTS__SHUTDOWN_S": "600"}
    async with replicas(1) as [fake], running(tmp_path, fake, workers, **grace) as gateway, gateway.client() as http:
        fake.script.append(gated)
        held = asyncio.create_task(http.post("/v1/completions", json={"prompt": "held"}))
        await eventually(lambda: fake.running == 1)
        await gateway.upgrade()
        os.kill(gateway.first, signal.SIGTERM)
        await asyncio.sleep(
            2 * DRAIN_S
        )  # until it would abort it, of which nothing tells; a shorter wait fails nothing
        assert not held.done()
        os.kill(gateway.first, signal.SIGTERM)
        await eventually(lambda: has_ended(gateway.first))
        with contextlib.suppress(aiohttp.ClientError):
            async with await held as answer:
                assert answer.status == 503


async def test_a_successor_that_dies_later_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(pipe: int, *_: int) -> subprocess.Popen[bytes]:
        os.write(pipe, b"serves")
        started.append(subprocess.Popen(["sleep", "60"]))
        return started[0]

    monkeypatch.setattr(handover, "_started", start)
    monkeypatch.setattr(handover, "_LOOK_S", 0.01)  # ships 1 s
    left = asyncio.Event()
    upgrade = Upgrade(left.set)
    with capture_logs() as log:
        upgrade.begin([], GatewayConfig())
        await left.wait()
        started[0].kill()
        await eventually(lambda: any(line["event"] == "successor_died" for line in log))
    [died] = [line for line in log if line["event"] == "successor_died"]
    assert (died["successor"], died["status"]) == (started[0].pid, -signal.SIGKILL)
    assert has_ended(started[0].pid), "nothing of it is left"


async def test_systemd_hears_that_the_gateway_serves_and_which_process_is_the_main_one(tmp_path: Path) -> None:
    path = f"{mkdtemp()}/notify"  # a socket's path is short
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.setblocking(False)
        loop = asyncio.get_running_loop()
        async with replicas(1) as [fake], running(tmp_path, fake, 0, NOTIFY_SOCKET=path) as gateway:
            assert await loop.sock_recv(manager, 100) == b"READY=1"
            await gateway.upgrade()
            assert await loop.sock_recv(manager, 100) == b"MAINPID=%d" % gateway.pids[1]


async def test_a_gateway_with_a_scheduler_socket_says_that_it_cannot_have_a_successor(tmp_path: Path) -> None:
    path = f"{mkdtemp()}/socket"
    async with replicas(1) as [fake], running(tmp_path, fake, 0, PREBLE_SCHEDULER_SOCKET=path) as gateway:
        os.kill(gateway.first, signal.SIGUSR2)
        await eventually(lambda: len(gateway.logged("cannot serve one scheduler_socket")) == 1)
        assert await is_served(gateway)


async def test_a_stop_at_the_very_moment_at_which_the_successor_serves_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(pipe: int, *_: int) -> subprocess.Popen[bytes]:
        os.write(pipe, b"serves")
        started.append(subprocess.Popen(["sleep", "60"]))
        return started[0]

    def read_and_stop(pipe: int, heard: asyncio.Future[bytes]) -> None:
        read(pipe, heard)
        handing_over.cancel()

    read = handover._read
    monkeypatch.setattr(handover, "_started", start)
    monkeypatch.setattr(handover, "_read", read_and_stop)
    handing_over = asyncio.create_task(handover._serving_successor([], GatewayConfig()))
    try:
        await asyncio.wait([handing_over])
        assert handing_over.cancelled()
        assert started[0].poll() is not None
    finally:
        started[0].kill()
        started[0].wait()


async def test_the_end_of_a_successor_that_is_being_ended_is_heard_once() -> None:
    says, pipe = os.pipe()
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    heard.cancel()
    calls: list[int] = []

    def read(*given: Any) -> None:
        calls.append(1)
        handover._read(*given)

    asyncio.get_running_loop().add_reader(says, read, says, heard)
    os.close(pipe)
    try:
        await eventually(lambda: bool(calls))
        for _ in range(10):
            await asyncio.sleep(0)
    finally:
        asyncio.get_running_loop().remove_reader(says)
        os.close(says)
    assert len(calls) == 1
