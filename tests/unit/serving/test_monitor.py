"""A replica's monitor, with a server, a rotation and a parity watch of the tests."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from preble.config import HealthConfig
from preble.serving.replicas.monitor import Down, ReplicaMonitor
from support.waiting import eventually


class Server:
    """One rank. It is another one at each probe."""

    replica_id, http = "r", object()

    def __init__(self) -> None:
        self.probes = 0

    async def probe(self) -> Any:
        self.probes += 1
        info = SimpleNamespace(models=("m",), adapters=(), roots=(), life=self.probes)
        return SimpleNamespace(engine=self, info=info, ranks=[SimpleNamespace(engine=self, info=info)])

    async def check_ready(self) -> None: ...

    async def models(self) -> None: ...

    async def follow_kv_events(self, take: object) -> None:
        await asyncio.Event().wait()

    def loads(self) -> None: ...

    async def close(self) -> None: ...


class Rotation:
    def __init__(self) -> None:
        self.lives: list[int] = []
        self.suspect = asyncio.Event()

    def add(self, engine: object, info: Any, suspect: asyncio.Event) -> Any:
        self.lives.append(info.life)
        self.suspect = suspect
        return SimpleNamespace(engine=engine, info=info, suspect=suspect)

    def remove(self, replica_id: str, reason: str | None, *, silent_since: float | None = None) -> None:
        self.lives.pop()

    def hold_back(self, replica_id: str, *, held_back: bool) -> None: ...

    def apply(self, changes: object) -> None: ...


class LingeringParity:
    """Its check of the first life ends long after it was cancelled."""

    def __init__(self) -> None:
        self.lingers = asyncio.Event()

    async def watch(self, replica: Any) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        if replica.info.life == 1:
            self.lingers.set()
            await asyncio.Event().wait()


async def test_a_monitor_that_is_cancelled_while_its_replica_joins_anew_leaves_nothing_in_the_rotation() -> None:
    rotation, parity = Rotation(), LingeringParity()
    monitor = ReplicaMonitor(Server(), rotation, HealthConfig(), parity)  # type: ignore[arg-type]
    watching = asyncio.create_task(monitor.run())
    await eventually(lambda: rotation.lives == [1], "it has joined")
    await asyncio.sleep(0)  # its check begins
    rotation.suspect.set()
    async with asyncio.timeout(10):
        await parity.lingers.wait()
    assert rotation.lives == [2], "it has joined anew while the check of its first life goes on"
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    assert rotation.lives == []
    assert monitor.has_left.is_set()


async def test_one_rank_whose_removal_fails_leaves_no_other_in_the_rotation() -> None:
    removed: list[object] = []

    class FailsToRemove(Rotation):
        def remove(self, replica_id: str, reason: str | None, *, silent_since: float | None = None) -> None:
            removed.append(replica_id)
            raise ZeroDivisionError

    monitor = ReplicaMonitor(Server(), FailsToRemove(), HealthConfig(), LingeringParity())  # type: ignore[arg-type]
    monitor._live = [SimpleNamespace(engine=SimpleNamespace(replica_id=name)) for name in "ab"]  # type: ignore[misc]
    with pytest.raises(ZeroDivisionError):
        monitor._leave(Down("it has gone"))
    assert removed == ["a", "b"]
