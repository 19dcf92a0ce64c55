"""The memory of a real gateway that refuses large bodies, or whose clients give them up, goes back to the system."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import sys
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from gateway.fakes import replicas
from support.waiting import PATIENCE_S, eventually

BODY_BYTES = 16_000_000
ROUNDS, UPLOADS = 4, 24
"""There is room for 16 bodies of the largest size."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % BODY_BYTES


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def upload(url: URL) -> asyncio.StreamWriter:
    """Send all of a body but its last byte."""
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(HEAD)
    with contextlib.suppress(OSError):  # it was refused
        for _ in range(BODY_BYTES // 250_000 - 1):
            writer.write(b"a" * 250_000)
            await writer.drain()
        writer.write(b"a" * 249_999)
        await writer.drain()
    return writer


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
async def test_the_memory_of_refused_and_given_up_uploads_goes_back() -> None:
    async with replicas(1) as [fake]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "preble", "serve", "--replica", fake.url, "--engine", "openai", "--port", "0"),
            *("--workers", "0", "--log-level", "error"),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PREBLE_LIMITS__MAX_BODY_BYTES": str(BODY_BYTES)},
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(PATIENCE_S):
                url = URL((await process.stdout.readline()).split()[-1].decode())
            async with aiohttp.ClientSession(url) as http:

                async def small_again() -> bool:
                    async with http.get("/metrics") as answer:
                        is_free = "preble_body_bytes 0.0" in await answer.text()
                    return is_free and resident_mb(process.pid) < before + 60

                before = resident_mb(process.pid)
                for _ in range(ROUNDS):
                    writers = await asyncio.gather(*(upload(url) for _ in range(UPLOADS)))
                    assert resident_mb(process.pid) > before + 150, "the bodies are there"
                    for writer in writers:
                        writer.transport.abort()
                    await eventually(small_again)
        finally:
            process.kill()
            await process.wait()
