from __future__ import annotations

import asyncio
import contextlib
from random import Random

import pytest
from structlog.testing import capture_logs

from preble import background
from preble.background import Backoff
from support.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits that ship are seconds."""
    monkeypatch.setattr(background, "FIRST_WAIT_S", 0.001)  # ships 1 s


class Work:
    """Ends as `ends` say, one start after the other, and then goes on until it is cancelled."""

    def __init__(self, *ends: BaseException | None) -> None:
        self._ends = list(ends)
        self.num_starts = 0
        self.goes_on = asyncio.Event()

    async def __call__(self) -> None:
        self.num_starts += 1
        if self._ends:
            if (end := self._ends.pop(0)) is not None:
                raise end
            return
        self.goes_on.set()
        await asyncio.Event().wait()


async def kept(work: Work) -> list[str]:
    """Keep this work until it goes on, then end it. Return the errors that were logged."""
    with capture_logs() as logs:
        task = background.keep(work, "beat")
        async with asyncio.timeout(30):
            await work.goes_on.wait()
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
    assert all(log["event"] == "task_ended" and log["task"] == "beat" for log in logs)
    return [log["error"] for log in logs]


async def test_a_task_that_fails_is_logged_and_starts_again() -> None:
    work = Work(ValueError("bad"), KeyError())
    assert await kept(work) == ["bad", "KeyError"]
    assert work.num_starts == 3


async def test_a_task_that_returns_is_logged_and_starts_again() -> None:
    assert await kept(Work(None)) == ["it returned"]


async def test_a_task_in_which_something_else_was_cancelled_starts_again() -> None:
    assert await kept(Work(asyncio.CancelledError())) == ["CancelledError"]


async def test_a_task_that_its_owner_cancels_ends_without_a_word() -> None:
    assert await kept(Work()) == []


async def test_a_task_that_fails_while_it_tidies_up_is_logged_and_ends() -> None:
    goes_on, starts = asyncio.Event(), []

    async def fails_at_the_end() -> None:
        starts.append(1)
        try:
            goes_on.set()
            await asyncio.Event().wait()
        finally:
            raise OSError("not removed")

    with capture_logs() as logs:
        task = background.keep(fails_at_the_end, "beat")
        await goes_on.wait()
        task.cancel()
        await asyncio.wait((task,), timeout=PATIENCE_S)
    assert task.cancelled() and len(starts) == 1
    assert [log["error"] for log in logs] == ["not removed"]


def test_waits_double_up_to_the_longest_and_begin_again_after_a_success() -> None:
    backoff = Backoff(1.0, 5.0, rng=None)
    assert [backoff.next_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next_s() == 1.0


def test_each_wait_is_shortened_at_random_by_at_most_half() -> None:
    backoff = Backoff(8.0, 8.0, Random(1))
    waits = [backoff.next_s() for _ in range(100)]
    assert len(set(waits)) > 50
    assert 4.0 <= min(waits) < 5.0 and 7.0 < max(waits) <= 8.0


async def loses_a_cancellation(loses: int) -> None:
    """Lose this many cancellations, as `asyncio.wait_for` of Python 3.11 may lose one."""
    for _ in range(loses):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    background.check_cancelled()
    await asyncio.Event().wait()


async def test_a_task_that_loses_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # shipped: 1 s, which the test would wait for three times
    monkeypatch.setattr(background, "CANCEL_AGAIN_S", 0.001)
    stubborn, willing, failed = (asyncio.create_task(loses_a_cancellation(loses)) for loses in (3, 0, 0))
    failed.cancel()
    await asyncio.sleep(0)
    await background.end(stubborn, willing, failed)
    assert stubborn.cancelled() and willing.cancelled() and failed.cancelled()
    await background.end()


async def test_a_lost_cancellation_is_raised_where_the_task_looks() -> None:
    task = asyncio.create_task(loses_a_cancellation(1))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=PATIENCE_S)
    assert task.cancelled()


async def test_a_time_limit_holds_in_a_task_that_was_cancelled_and_tidies_up() -> None:
    ends: list[BaseException] = []

    async def tidies_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                async with background.time_limit(0.0):
                    await asyncio.Event().wait()
            except BaseException as error:
                ends.append(error)
                raise

    task = asyncio.create_task(tidies_up())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(TimeoutError):
        await task
    assert len(ends) == 1


async def test_a_cancellation_within_a_time_limit_is_one() -> None:
    async def waits() -> None:
        async with background.time_limit(PATIENCE_S):
            await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
