"""Work in the background, and waits between attempts.

No task that lasts may end unheard. There are two ways to have one:
- `keep` starts it again when it ends, and logs why it did: for loops that others can do without for a moment.
- `asyncio.TaskGroup` ends with it whoever opened the group: for what nothing works without.
Raw tasks are for work that is awaited or short; a test lists them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import structlog

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
"""Between the end of a task and its next start. One that has run for longer than the longest starts from the first."""
CANCEL_AGAIN_S = 1.0
_RNG = Random()


class Backoff:
    """Waits between attempts, each twice as long as the last one, from `first_s` to `longest_s`.

    `rng`: shortens each wait by up to half, so that many who failed together do not come back together. None: does not.
    """

    def __init__(self, first_s: float, longest_s: float, rng: Random | None = _RNG) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._rng = rng
        self._wait_s = first_s

    def next_s(self) -> float:
        """Return how long to wait now; the next wait is longer.

        >>> backoff = Backoff(1.0, 5.0, rng=None)
        >>> [backoff.next_s() for _ in range(4)]
        [1.0, 2.0, 4.0, 5.0]
        """
        wait_s = min(self._wait_s, self._longest_s)
        self._wait_s = 2 * wait_s
        return wait_s if self._rng is None else self._rng.uniform(wait_s / 2, wait_s)

    async def pause(self) -> None:
        """Wait."""
        await asyncio.sleep(self.next_s())

    def reset(self) -> None:
        """Begin with the first wait again: an attempt has succeeded."""
        self._wait_s = self._first_s


def keep(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
    """Start a task that lasts until its owner cancels it. If it ends otherwise, log that and start it again.

    `work`: called at each start. `name`: for the log.
    """
    return asyncio.create_task(run(work, name), name=name)


async def run(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    """Do as `keep`, within the running task."""
    loop, backoff = asyncio.get_running_loop(), Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
    while True:
        began = loop.time()
        error = await _end_of(work)
        if loop.time() - began > LONGEST_WAIT_S:
            backoff.reset()
        wait_s = backoff.next_s()
        text = "it returned" if error is None else str(error) or type(error).__name__
        log = structlog.get_logger()
        log.error("task_ended", task=name, error=text, starts_again_in_s=round(wait_s, 2), exc_info=error)
        check_cancelled()  # it may have failed while it tidied up
        await asyncio.sleep(wait_s)


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and return when they have ended; their errors are not raised.

    Cancels again those that go on: a library may take a cancellation for a failure of its own, or lose it, as
    `asyncio.wait_for` of Python 3.11 does if what it waits for comes at the same moment.
    """
    while going_on := {task for task in tasks if not task.done()}:
        for task in going_on:
            task.cancel()
        await asyncio.wait(going_on, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Do as `asyncio.timeout`, also in a task that was cancelled before and tidies up now.

    Python's own, before 3.11.4, takes its end there for the earlier cancellation. Raises: TimeoutError.
    """
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except asyncio.CancelledError:
        if task is not None and limit.expired() and task.cancelling() <= before:
            raise TimeoutError from None
        raise


def check_cancelled() -> None:
    """Call this after a library's work, in a task that nobody waits for.

    Raises: CancelledError: the running task was cancelled, and the library has lost it; see `end`.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _end_of(work: Callable[[], Coroutine[Any, Any, None]]) -> BaseException | None:
    """Return the error that the work ends with, None if it returns. Raises: CancelledError, if the owner cancels."""
    task = asyncio.current_task()
    assert task is not None
    try:
        await work()
    except asyncio.CancelledError as error:
        if task.cancelling():
            raise
        return error  # something that the work awaited was cancelled
    except Exception as error:  # noqa: BLE001 (whatever it is: it is logged, and the work goes on)
        return error
    return None


def end_with_parent() -> None:
    """Leave Ctrl-C to the process that started this one, and end with it, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
