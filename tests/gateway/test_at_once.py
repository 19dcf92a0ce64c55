"""Coroutines that run at once, and in a task only from where they wait."""

from __future__ import annotations

import asyncio

import pytest

from preble.web.server.answering import run_until_wait


class Work:
    """Waits for each of some things in turn, and notes what happens."""

    def __init__(self, *awaited: asyncio.Future[None] | None) -> None:
        self.awaited = awaited
        self.done = 0
        self.was_cancelled = False

    async def run(self) -> None:
        try:
            for each in self.awaited:
                await (asyncio.sleep(0) if each is None else each)
                self.done += 1
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


async def test_what_never_waits_needs_no_task() -> None:
    done = asyncio.get_running_loop().create_future()
    done.set_result(None)
    work = Work(done)
    assert run_until_wait(work.run(), asyncio.get_running_loop()) is None
    assert work.done == 1


async def test_what_fails_at_once_raises_at_once() -> None:
    async def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        run_until_wait(fail(), asyncio.get_running_loop())


async def test_the_rest_runs_in_a_task_once_what_it_waits_for_is_there() -> None:
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    work = Work(first, None, second)
    task = run_until_wait(work.run(), loop)
    assert task is not None
    await asyncio.sleep(0)
    assert work.done == 0
    first.set_result(None)
    second.set_result(None)
    await task
    assert work.done == 3


async def test_the_rest_may_use_what_needs_a_task() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await asyncio.sleep(0)

    task = run_until_wait(work(), asyncio.get_running_loop())
    assert task is not None
    await task


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_a_task_that_is_cancelled_cancels_what_it_waits_for_whether_it_has_begun_or_not(turns: int) -> None:
    loop = asyncio.get_running_loop()
    awaited = loop.create_future()
    work = Work(awaited)
    task = run_until_wait(work.run(), loop)
    assert task is not None
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.was_cancelled
    assert awaited.cancelled()


async def test_a_failure_of_what_it_waits_for_is_the_coroutines() -> None:
    loop = asyncio.get_running_loop()
    awaited = loop.create_future()
    work = Work(awaited)
    task = run_until_wait(work.run(), loop)
    assert task is not None
    awaited.set_exception(ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        await task
