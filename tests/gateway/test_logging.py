"""The gateway as a process: a stderr that takes nothing costs lines, never a request; SIGHUP ends nothing."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import pytest

from gateway.fakes import FakeReplica, replicas
from support.waiting import PATIENCE_S, eventually

REQUESTS = 20


@contextmanager
def full_disk() -> Iterator[int]:
    with Path("/dev/full").open("w") as file:
        yield file.fileno()


@contextmanager
def reader_gone() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextmanager
def reader_asleep() -> Iterator[int]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with os.fdopen(writer, "wb", 0) as pipe:
        while pipe.write(bytes(65536)):
            pass
        os.set_blocking(writer, True)
        yield writer
    os.close(reader)


@asynccontextmanager
async def gateway(fake: FakeReplica, stderr: int, *signals: signal.Signals) -> AsyncIterator[str]:
    """The URL of a gateway in a process of its own, which gets `signals` once it listens."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "preble", "serve", "--replica", fake.url, "--engine", "openai", "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            url = (await process.stdout.readline()).decode().split()[-1]
            for number in signals:
                process.send_signal(number)
            yield url
    finally:
        process.terminate()
        await process.wait()


async def value(http: aiohttp.ClientSession, metric: str) -> float:
    async with http.get("/metrics") as answer:
        found = re.search(rf"^{metric}(?:{{.*}})? (\S+)$", await answer.text(), re.MULTILINE)
    return float(found[1]) if found else 0.0


async def until_ready(http: aiohttp.ClientSession) -> None:
    while True:
        async with http.get("/ready") as answer:
            if answer.status == 200:
                return
        await asyncio.sleep(0.05)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("stderr", [full_disk, reader_gone, reader_asleep])
async def test_no_request_fails_where_no_log_line_is_taken(stderr: object) -> None:
    assert callable(stderr)
    async with replicas(1) as [fake]:
        with stderr() as number:
            async with gateway(fake, number) as url, aiohttp.ClientSession(url) as http:
                await until_ready(http)
                for _ in range(REQUESTS):
                    async with http.post("/v1/completions", json={"model": "tiny", "prompt": "hello"}) as answer:
                        assert answer.status == 200

                async def is_over() -> bool:
                    return await value(http, "preble_in_flight") == 0

                async def are_lost() -> bool:
                    return await value(http, "preble_log_lines_lost") >= REQUESTS

                await eventually(is_over, "nothing is in flight")
                await eventually(are_lost, "each request's line is lost")


async def test_sighup_ends_nothing() -> None:
    stderr = asyncio.subprocess.DEVNULL
    async with (
        replicas(1) as [fake],
        gateway(fake, stderr, signal.SIGHUP) as url,
        aiohttp.ClientSession(url) as http,
    ):
        await until_ready(http)
        async with http.post("/v1/completions", json={"model": "tiny", "prompt": "hello"}) as answer:
            assert answer.status == 200
