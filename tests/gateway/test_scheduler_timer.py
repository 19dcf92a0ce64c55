from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from preble.core.types import PrefixReplication
from preble.serving.placements import SchedulerTimer
from preble.serving.telemetry.metrics import Telemetry
from support.waiting import PATIENCE_S


class OverdueScheduler:
    """A scheduler whose timer is always due already, until it was called."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    def next_timer(self) -> float | None:
        return None if self.called.is_set() else 0.0

    def on_timer(self, now: float) -> list[PrefixReplication]:
        self.called.set()
        return []


@pytest.mark.plain
@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_an_overdue_timer_is_armed_once_more_without_harm(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """uvloop gives a handle without its time for a call in the past."""

    async def armed_twice_in_one_instant() -> None:
        scheduler = OverdueScheduler()
        timer = SchedulerTimer(scheduler, Telemetry())  # type: ignore[arg-type]
        timer.arm()
        timer.arm()
        async with asyncio.timeout(PATIENCE_S):
            await scheduler.called.wait()
        timer.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(armed_twice_in_one_instant())
