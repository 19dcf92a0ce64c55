from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from preble.core.types import ReplicaId
from preble.errors import EngineGone
from preble.serving.cancel_scope import CancelScope
from preble.serving.replicas.resync_backoff import FIRST_WAIT_S, LONGEST_WAIT_S, ResyncBackoff

R = ReplicaId("r")


async def test_work_that_is_withdrawn_is_cancelled_and_the_replica_is_gone() -> None:
    cancel_scope = CancelScope(R)
    cancelled = False
    with pytest.raises(EngineGone, match="replica r went silent") as caught:
        async with cancel_scope:
            asyncio.get_running_loop().call_soon(cancel_scope.withdraw, "went silent")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled = True
                raise
    assert cancelled and caught.value.replica_id == R
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_withdrawing_twice_or_what_is_over_or_has_not_begun_does_nothing() -> None:
    cancel_scope = CancelScope(R)
    cancel_scope.withdraw("too early")
    async with cancel_scope:
        await asyncio.sleep(0)
    cancel_scope.withdraw("too late")
    again = CancelScope(R)
    with pytest.raises(EngineGone, match="first"):
        async with again:
            again.withdraw("first")
            again.withdraw("second")
            await asyncio.Event().wait()


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    started = asyncio.Event()

    async def work() -> None:
        async with CancelScope(R):
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_stream_is_asked_to_start_over_at_once_and_then_ever_less_often() -> None:
    pace = ResyncBackoff()
    parsed = [float(second) for second in range(3000) if pace.is_due(float(second))]
    waits = [later - earlier for earlier, later in pairwise(parsed)]
    assert parsed[0] == 0.0
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 640.0, 640.0]


def test_after_a_long_quiet_time_it_starts_anew() -> None:
    pace = ResyncBackoff()
    for second in range(100):
        pace.is_due(float(second))
    later = 100.0 + 2 * LONGEST_WAIT_S
    assert pace.is_due(later)
    assert not pace.is_due(later + FIRST_WAIT_S - 1) and pace.is_due(later + FIRST_WAIT_S)
