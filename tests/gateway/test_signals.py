"""Signals at every line that `preble serve` logs while it starts: none is lost, and none ends what was accepted."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from gateway.fakes import FakeReplica, gated, replicas
from support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
STARTED = b"preble serve: listening on "


class Starting:
    """`preble serve` while it starts. `lines`: what it has said so far, on both streams."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[bytes] = []

    async def until(self, num_lines: int) -> bool:
        """Read this many lines, or up to that which says that it listens. Return whether the latter has come."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            while len(self.lines) < num_lines and not self.has_started:
                line = await self.process.stdout.readline()
                assert line, b"".join(self.lines)
                self.lines.append(line)
        return self.has_started

    @property
    def has_started(self) -> bool:
        return any(STARTED in line for line in self.lines)

    @property
    def url(self) -> str:
        [line] = [line for line in self.lines if STARTED in line]
        return line.split()[-1].decode()

    async def ended(self) -> int:
        """Return its exit status; the rest that it says is in `lines` then."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            self.lines.append(await self.process.stdout.read())
            return await self.process.wait()


@asynccontextmanager
async def starting(fake: FakeReplica, workers: int) -> AsyncIterator[Starting]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "preble", "serve", "--replica", fake.url, "--engine", "openai", "--port", "0"),
        *("--workers", str(workers), "--log-level", "debug", "--log-format", "json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PREBLE_TIMEOUTS__DRAIN_S": "0.1", "PYTHONUNBUFFERED": "1"},
        process_group=0,
    )
    try:
        yield Starting(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGTERM, 0), (signal.SIGTERM, 2), (signal.SIGINT, 2)])
async def test_a_stop_at_any_line_of_the_start_ends_it_well(number: signal.Signals, workers: int) -> None:
    """Sent to the whole group, as a terminal does."""
    async with replicas(1) as [fake]:
        has_started, num_lines = False, 0
        while not has_started:
            num_lines += 1
            async with starting(fake, workers) as one:
                has_started = await one.until(num_lines)
                os.killpg(one.process.pid, number)
                assert (await one.ended(), b"Traceback" in b"".join(one.lines)) == (0, False), one.lines
        assert num_lines >= 2


@pytest.mark.parametrize("workers", [0, 2])
async def test_a_reload_at_any_line_of_the_start_is_done_after_it(workers: int) -> None:
    async with replicas(1) as [fake]:
        has_started, num_lines = False, 0
        while not has_started:
            num_lines += 1
            async with starting(fake, workers) as one:
                has_started = await one.until(num_lines)
                for number in (signal.SIGHUP, signal.SIGUSR1):
                    one.process.send_signal(number)
                while not any(b'"reloaded"' in line for line in one.lines):
                    await one.until(1_000_000) if not one.has_started else one.lines.append(await line_of(one))
                one.process.terminate()
                assert await one.ended() == 0, one.lines


async def line_of(one: Starting) -> bytes:
    assert one.process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        return await one.process.stdout.readline()


@pytest.mark.parametrize("workers", [0, 2])
async def test_many_reloads_at_once_are_one_or_two_and_harm_no_request(workers: int) -> None:
    async with replicas(1) as [fake], starting(fake, workers) as one:
        await one.until(1_000_000)
        async with aiohttp.ClientSession(one.url) as http:
            await eventually(lambda: is_served(http))
            fake.script.append(gated)
            held = asyncio.create_task(http.post("/v1/completions", json={"prompt": "held"}))
            await eventually(lambda: fake.running == 1)
            for _ in range(60):
                one.process.send_signal(signal.SIGHUP)
                one.process.send_signal(signal.SIGUSR1)
            fake.gate.set()
            async with await held as answer:
                assert answer.status == 200
        one.process.terminate()
        assert await one.ended() == 0
        assert b"".join(one.lines).count(b'"reloaded"') <= 2


async def is_served(http: aiohttp.ClientSession) -> bool:
    async with http.post("/v1/completions", json={"prompt": "a"}) as answer:
        return answer.status == 200
