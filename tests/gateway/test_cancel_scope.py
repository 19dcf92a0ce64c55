from __future__ import annotations

import asyncio

import pytest

from preble.core.types import ReplicaId
from preble.errors import EngineGone
from preble.gateway.requests.attempt import CancelScope

R = ReplicaId("r")


async def test_cancelled_work_ends_as_a_replica_that_is_gone() -> None:
    cancel_scope = CancelScope(R)
    cancelled = False
    with pytest.raises(EngineGone, match="replica r went silent") as caught:
        async with cancel_scope:
            asyncio.get_running_loop().call_soon(cancel_scope.cancel, "went silent")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled = True
                raise
    assert cancelled and caught.value.replica_id == R
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_a_second_an_early_and_a_late_cancel_do_nothing() -> None:
    cancel_scope = CancelScope(R)
    cancel_scope.cancel("too early")
    async with cancel_scope:
        await asyncio.sleep(0)
    cancel_scope.cancel("too late")
    again = CancelScope(R)
    with pytest.raises(EngineGone, match="first"):
        async with again:
            again.cancel("first")
            again.cancel("second")
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
