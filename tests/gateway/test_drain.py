"""A gateway that gets SIGTERM serves on while load balancers notice, and a new one can take over its socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

import aiohttp
import pytest

from gateway.conftest import Serve
from gateway.fakes import FakeReplica, gated, replicas
from preble.errors import ConfigError
from preble.web.server.listening import inherited, listen
from support.load import load
from support.waiting import PATIENCE_S, eventually

ON_GIVEN_SOCKET = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "PREBLE_TIMEOUTS__DRAIN_S": "0.5"}
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


async def test_a_draining_gateway_is_not_ready_and_serves_on(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script.append(gated)
        before = asyncio.create_task(gateway.complete())
        await eventually(lambda: one.running == 1)
        gateway.gateway.drain()
        one.gate.set()
        async with gateway.http.get("/ready") as answer:
            assert (answer.status, (await answer.json())["status"]) == (503, "draining")
        for status, _, headers in (await before, await gateway.complete()):
            assert status == 200
            assert headers["connection"] == "close"


class Process:
    """A gateway in a process of its own, on a socket that is kept by its parent."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, fake: FakeReplica, listener: socket.socket, workers: int) -> Process:
        """Return once it takes requests."""
        number = listener.fileno()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ON_GIVEN_SOCKET, str(number)),
            *("-m", "preble", "serve", "--replica", fake.url, "--engine", "openai", "--workers", str(workers)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(number,),
        )
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            assert b"listening" in await process.stdout.readline()
        return cls(process)

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return await self.process.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="passes a socket to a process")
@pytest.mark.parametrize("workers", [0, 2])
async def test_no_request_is_lost_when_a_new_gateway_takes_over_the_socket(workers: int) -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.set_inheritable(True)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with replicas(1) as [one]:
            current = await Process.start(one, listener, workers)
            async with load(lambda: aiohttp.ClientSession(url)) as clients:
                await clients.some_more(40)
                for _ in range(2):
                    following = await Process.start(one, listener, workers)
                    assert await current.stop() == 0
                    current = following
                    await clients.some_more(40)
            assert await current.stop(signal.SIGINT) == 0
            assert clients.wrong == []


@pytest.mark.parametrize(
    ("environ", "said"),
    [({"LISTEN_FDS": "2"}, "exactly one"), ({"LISTEN_FDS": "1"}, "unset LISTEN_FDS")],
)
def test_a_socket_that_cannot_be_used_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        inherited({**environ, "LISTEN_PID": str(os.getpid())})


def test_a_socket_for_another_process_is_not_taken() -> None:
    assert inherited({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) is None
    assert inherited({}) is None
