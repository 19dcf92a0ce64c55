"""A small fleet is killed and starts again under load: no client notices, with the default settings."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from operator import gt

import aiohttp
import pytest

from preble.engines.starting.ports import free_ports
from support.waiting import PATIENCE_S, eventually

REQUESTS, CLIENTS = 400, 12
UNTIL_KILLED = 100
"""So many have been answered when the replicas are killed."""


@asynccontextmanager
async def command(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A running `preble` command that has said where it listens; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "preble", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def emulate(port: int) -> tuple[str, ...]:
    return ("emulate", "--profile", "tiny-cpu", "--port", str(port))


class Clients:
    """Clients that ask until so many requests are answered, whole answers only: a stream that began is lost."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self._left = REQUESTS
        self.statuses: Counter[int] = Counter()
        self.answered = [0] * CLIENTS

    async def ask(self, number: int) -> None:
        while self._left:
            self._left -= 1
            body = {"prompt": f"document {self._left % 7} " * 20, "max_tokens": 4}
            async with self._http.post("/v1/completions", json=body) as answer:
                await answer.read()
                self.statuses[answer.status] += 1
                self.answered[number] += 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
async def test_a_fleet_that_is_killed_and_starts_again_loses_no_request(workers: str) -> None:
    ports = free_ports(3)
    urls = [f"--replica=http://127.0.0.1:{port}" for port in ports[:2]]
    async with (
        command(*emulate(ports[0])) as one,
        command(*emulate(ports[1])) as two,
        command("serve", *urls, "--port", str(ports[2]), "--workers", workers),
        aiohttp.ClientSession(f"http://127.0.0.1:{ports[2]}", timeout=aiohttp.ClientTimeout(PATIENCE_S)) as http,
    ):

        async def up() -> int:
            async with http.get("/ready") as page:
                return int((await page.json())["replicas"])

        async def are_up() -> bool:
            return await up() == 2

        async def are_gone() -> bool:
            return await up() == 0

        await eventually(are_up)
        clients = Clients(http)
        asking = [asyncio.create_task(clients.ask(number)) for number in range(CLIENTS)]
        await eventually(lambda: clients.statuses.total() >= UNTIL_KILLED)
        os.kill(one.pid, signal.SIGKILL)
        before = list(clients.answered)
        # A request that has broken two replicas is not sent to a third, so none may be on its second one now.
        await eventually(lambda: all(map(gt, clients.answered, before)))
        os.kill(two.pid, signal.SIGKILL)
        await eventually(are_gone)
        async with command(*emulate(ports[0])), command(*emulate(ports[1])):
            await asyncio.gather(*asking)
        assert clients.statuses == {200: REQUESTS}
