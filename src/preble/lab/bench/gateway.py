"""The gateway under measurement: a process of its own, in front of replicas."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from preble.engines.starting.commands import Command
from preble.engines.starting.launch import ReplicaProcess
from preble.errors import EngineTimeout

JOIN_TIMEOUT_S = 300.0
"""Time limit for the gateway to listen and for every replica to join it: a busy machine takes minutes."""

POLL_S = 0.1


@asynccontextmanager
async def started_gateway(
    replica_urls: Sequence[str], args: Sequence[str], log_path: Path, *, source: Path | None = None
) -> AsyncIterator[ReplicaProcess]:
    """Run `preble serve` with these arguments, every replica joined, while the context lasts.

    `source`: a folder with the package of another version; None for this one.
    Raises: EngineError: it does not start, or replicas do not join.
    """
    argv = [sys.executable, "-m", "preble", "serve", "--port", "0", *args]
    for url in replica_urls:
        argv += ["--replica", url]
    env = dict(os.environ) if source is None else os.environ | {"PYTHONPATH": str(source)}
    gateway = ReplicaProcess("gateway", Command(tuple(argv), env, None), log_path)
    try:
        await gateway.start()
        await gateway.wait_ready(JOIN_TIMEOUT_S)
        await _until_joined(gateway.url, len(replica_urls))
        yield gateway
    finally:
        await gateway.stop()


async def _until_joined(url: str, num_replicas: int) -> None:
    """Wait until the gateway has that many live replicas. Raises: EngineTimeout: after JOIN_TIMEOUT_S."""
    joined = None
    try:
        async with asyncio.timeout(JOIN_TIMEOUT_S), aiohttp.ClientSession() as session:
            while joined != num_replicas:
                async with session.get(f"{url}/ready") as response:
                    joined = (await response.json())["replicas"]
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise EngineTimeout(f"{joined} of {num_replicas} replicas joined within {JOIN_TIMEOUT_S:g} s") from error
