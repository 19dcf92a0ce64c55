"""A replica's pushed load, from a publisher that restarts, falls silent and talks rubbish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from preble.core.types import ReplicaId
from preble.engines.adapter import EngineLoad
from preble.engines.kv_events.sockets import KvEventEndpoints
from preble.engines.sglang.load_stream import MAX_READINGS, LoadStream
from support.kv_publisher import ScriptedPublisher
from support.waiting import PATIENCE_S, eventually

TOPIC = "load"
NUMBER = bytes(8)


def stat(running: Any, waiting: Any = 0, kv_tokens: Any = 0, *more: Any) -> bytes:
    return msgspec.msgpack.encode(["LoadStat", running, waiting, kv_tokens, *more])


class Watcher:
    """All that a stream has reported."""

    def __init__(self, stream: LoadStream) -> None:
        self.stream = stream
        self.told: list[EngineLoad | None] = []

    async def run(self) -> None:
        async for load in self.stream.loads():
            self.told.append(load)

    async def sees(self, load: EngineLoad | None) -> None:
        """Return when this was reported last."""
        await eventually(lambda: self.told[-1:] == [load], f"{load} is reported, it is {self.told[-1:]}")


@asynccontextmanager
async def watching(publisher: ScriptedPublisher, **options: Any) -> AsyncIterator[Watcher]:
    """Subscribed."""
    endpoints = KvEventEndpoints(publisher.endpoints.endpoint, topic=TOPIC)
    watcher = Watcher(LoadStream(ReplicaId("r0"), endpoints, **options))
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(watcher.run())
        await publisher.subscribed()
        try:
            yield watcher
        finally:
            watcher.stream.close()
    assert task.done()


async def push(publisher: ScriptedPublisher, payload: bytes, *, topic: str = TOPIC) -> None:
    await publisher.send(topic.encode(), NUMBER, payload)


async def test_each_reading_is_reported_whatever_fields_follow() -> None:
    async with ScriptedPublisher() as publisher, watching(publisher) as watcher:
        await push(publisher, stat(1, 2, 300))
        await watcher.sees(EngineLoad(running=1, waiting=2, kv_tokens=300))
        await push(publisher, stat(4, 0, 5, 65_536, 0, 7, 8, 16, 900, 12_345, "of a later version"))
        await watcher.sees(EngineLoad(running=4, waiting=0, kv_tokens=5))


async def test_of_many_readings_the_newest_counts() -> None:
    async with ScriptedPublisher() as publisher, watching(publisher) as watcher:
        for running in range(MAX_READINGS + 50):
            await push(publisher, stat(running))
        await watcher.sees(EngineLoad(MAX_READINGS + 49, 0, 0))
        assert len(watcher.told) < MAX_READINGS, "what had arrived together was reported once"


@pytest.mark.parametrize(
    "frames",
    [
        [b"load"],
        [b"load", NUMBER],
        [b"load", b"short", stat(9)],
        [b"load", NUMBER, stat(9), b""],
        [b"load", NUMBER, b""],
        [b"load", NUMBER, b"\xc1"],
        [b"load", NUMBER, b"\x91" * 100_000],
        [b"load", NUMBER, stat(-1)],
        [b"load", NUMBER, stat("9")],
        [b"load", NUMBER, stat(None)],
        [b"load", NUMBER, stat(1.5)],
        [b"load", NUMBER, stat(True)],
        [b"load", NUMBER, msgspec.msgpack.encode(["LoadStat", 9, 9])],
        [b"load", NUMBER, msgspec.msgpack.encode(["OtherStat", 9, 9, 9])],
        [b"load", NUMBER, msgspec.msgpack.encode({"type": "LoadStat", "num_running_reqs": 9})],
        [b"loads", NUMBER, stat(9)],
    ],
    ids=lambda frames: repr(b" ".join(frames))[2:40],
)
async def test_rubbish_is_ignored(frames: list[bytes]) -> None:
    async with ScriptedPublisher() as publisher, watching(publisher) as watcher:
        await push(publisher, stat(1))
        await publisher.send(*frames)
        await push(publisher, stat(2))
        await watcher.sees(EngineLoad(2, 0, 0))
        assert all(load is not None and load.running < 3 for load in watcher.told)


async def test_the_load_of_an_engine_that_fell_silent_is_unknown_until_it_speaks_again() -> None:
    async with ScriptedPublisher() as publisher, watching(publisher, silent_after_s=0.0) as watcher:
        await push(publisher, stat(1))
        await eventually(lambda: EngineLoad(1, 0, 0) in watcher.told, "it is reported")
        await watcher.sees(None)
        await push(publisher, stat(2))
        await eventually(lambda: EngineLoad(2, 0, 0) in watcher.told, "it is reported")


async def test_the_load_is_unknown_from_a_restart_to_the_first_reading_after_it() -> None:
    async with ScriptedPublisher() as publisher, watching(publisher, silent_after_s=1000.0) as watcher:
        await push(publisher, stat(1))
        await watcher.sees(EngineLoad(1, 0, 0))
        await publisher.restart()
        await watcher.sees(None)
        # SGLang repeats itself. One reading may go to the old connection, which subscribes again before it is given up.
        async with asyncio.timeout(PATIENCE_S):
            while watcher.told[-1] != EngineLoad(2, 0, 0):
                await push(publisher, stat(2))
                await asyncio.sleep(0.05)
        assert EngineLoad(1, 0, 0) not in watcher.told[watcher.told.index(None) :]


async def test_nobody_listening_is_no_load_and_no_error() -> None:
    async with ScriptedPublisher() as publisher:
        endpoints = KvEventEndpoints(publisher.endpoints.endpoint, topic=TOPIC)
    stream = LoadStream(ReplicaId("r0"), endpoints, silent_after_s=0.0)
    loads = stream.loads()
    assert await anext(loads) is None
    await loads.aclose()
    assert stream.closed
