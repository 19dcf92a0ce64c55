from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from preble.core.types import BlocksEvicted, PrefixReplication, ReplicaId, ReplicaSpec
from preble.decisions.recent import RecentDecisions
from preble.engines import EngineInfo
from preble.serving.dispatcher import Dispatcher
from preble.serving.replicas.live import LiveReplica
from preble.serving.telemetry.metrics import Telemetry


class OverdueScheduler:
    """A scheduler whose timer is always due already, until it was called."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    def on_evicted(self, event: BlocksEvicted, now: float) -> None:
        """Nothing is held."""

    def next_timer(self) -> float | None:
        return None if self.called.is_set() else 0.0

    def on_timer(self, now: float) -> list[PrefixReplication]:
        self.called.set()
        return []


class Client:
    """The seam to a replica: only its name is asked for."""

    replica_id = ReplicaId("r")


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_an_overdue_timer_is_armed_once_more_without_harm(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """uvloop gives a handle without its time for a call in the past."""

    async def two_events_in_one_instant() -> None:
        scheduler = OverdueScheduler()
        dispatcher = Dispatcher(scheduler, Telemetry(), RecentDecisions("none", 1))  # type: ignore[arg-type]
        dispatcher.replicas.add(LiveReplica(Client(), EngineInfo("fake", ("m",), ReplicaSpec(Client.replica_id))))  # type: ignore[arg-type]
        dispatcher.apply(BlocksEvicted(ReplicaId("r"), ()))
        dispatcher.apply(BlocksEvicted(ReplicaId("r"), ()))
        async with asyncio.timeout(20):
            await scheduler.called.wait()
        dispatcher.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(two_events_in_one_instant())
