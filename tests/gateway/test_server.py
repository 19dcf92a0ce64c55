"""The gateway as its own process, on uvloop."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
import sys
from unittest.mock import Mock

import aiohttp
import pytest
from structlog.testing import capture_logs

from gateway.fakes import gated_stream, replicas
from preble.config import GatewayConfig, ReplicaConfig
from preble.errors import ConfigError
from preble.gateway.server import serving, tell_of_listening
from preble.serving.scheduler_setup import build_scheduler
from support.waiting import PATIENCE_S

PROGRAM = """
import sys
from preble.config.load import load
from preble.gateway.server import run
run(load(None, {}, {"port": 0, "engine": "openai", "replicas": sys.argv[1:], "parity.enabled": False}))
"""
LARGE_MEMORY = """
import os
from pathlib import Path
from preble.web.server.memory import return_large_memory
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
return_large_memory()
before, small = resident(), []
for _ in range(3):
    large = []
    for _ in range(30):
        large.append(bytes(range(250)) * 16_000)
        small.append(bytes(100_000))
    del large
print((resident() - before) // 1_000_000)
"""
SAID = b"preble serve: listening on "


async def started(*urls: str) -> tuple[asyncio.subprocess.Process, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        *urls,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert process.stdout is not None
    async for line in process.stdout:
        if line.startswith(SAID):
            return process, line.removeprefix(SAID).decode().strip()
    raise AssertionError(f"the gateway ended with {await process.wait()}")


async def ready(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with http.get("/ready") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_after_what_runs_has_finished(number: signal.Signals) -> None:
    async with replicas(1) as [one]:
        process, url = await started(one.url)
        async with aiohttp.ClientSession(url) as http:
            await ready(http)
            one.script.append(gated_stream)
            async with http.post("/v1/completions", json={"prompt": "a", "stream": True}) as answer:
                await answer.content.readany()
                process.send_signal(number)
                one.gate.set()
                assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0


async def test_a_second_signal_does_not_wait() -> None:
    async with replicas(1) as [one]:
        process, url = await started(one.url)
        async with aiohttp.ClientSession(url) as http:
            await ready(http)
            one.script.append(gated_stream)
            async with http.post("/v1/completions", json={"prompt": "a", "stream": True}) as answer:
                await answer.content.readany()
                process.send_signal(signal.SIGINT)
                while await is_listening(url):  # noqa: ASYNC110 (another process's state)
                    await asyncio.sleep(0.02)
                process.send_signal(signal.SIGINT)
                assert b'"code":"shutting_down"' in await answer.content.read()
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0


async def is_listening(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True


async def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = GatewayConfig(replicas=(ReplicaConfig("http://127.0.0.1:1"),), port=port)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with serving(config):
                pass


async def test_a_host_that_is_none_is_a_clear_error() -> None:
    config = GatewayConfig(replicas=(ReplicaConfig("http://127.0.0.1:1"),), host="no.such.host.invalid")
    with pytest.raises(ConfigError, match="cannot listen on no"):
        async with serving(config):
            pass


def test_an_unknown_policy_or_profile_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="unknown policy 'e3'"):
        build_scheduler(GatewayConfig(policy="e3"))
    with pytest.raises(ConfigError, match="no-such-gpu"):
        build_scheduler(GatewayConfig(profile="no-such-gpu"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's threshold")
async def test_the_memory_of_large_bodies_goes_back_when_small_ones_stay() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", LARGE_MEMORY, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert int(output) < 30, "of 360 MB of large ones, and 9 MB of small ones"


@pytest.mark.parametrize(
    ("address", "has_keys", "is_warned"),
    [("0.0.0.0", False, True), ("0.0.0.0", True, False), ("127.0.0.1", False, False)],
)
def test_a_gateway_that_everybody_can_reach_without_a_key_says_so(
    address: str, has_keys: bool, is_warned: bool
) -> None:
    listener = Mock(spec=socket.socket, family=socket.AF_INET)
    listener.getsockname.return_value = (address, 8000)
    with capture_logs() as log:
        tell_of_listening(listener, GatewayConfig(replicas=(ReplicaConfig("http://a:1"),)), has_keys=has_keys)
    assert [event["hint"] for event in log if event["event"] == "open_to_everyone"] == (
        ["set auth.api_keys or auth.keys_file"] if is_warned else []
    )
