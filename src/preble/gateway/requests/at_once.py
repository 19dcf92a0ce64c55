"""Coroutines that hardly ever wait: run at once, and in a task only from where they wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, final


def run_until_wait(coroutine: Coroutine[Any, None, None], loop: asyncio.AbstractEventLoop) -> asyncio.Task[None] | None:
    """Run a coroutine until it waits or ends. Return the task in which its rest runs, None if it has ended.

    Before it waits there is no current task. So it must wait for a turn of the event loop (`asyncio.sleep(0)`) before
    it uses what needs one, such as `asyncio.timeout` or a `TaskGroup`. Raises: what the coroutine raises at once.
    """
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        return None
    return loop.create_task(_Rest(coroutine, waits_for))


@final
class _Rest(Coroutine[Any, None, None]):
    """A coroutine that already waits for something."""

    def __init__(self, coroutine: Coroutine[Any, None, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for
        self._has_begun = False

    def send(self, value: None) -> Any:
        if self._has_begun:
            return self._coroutine.send(value)
        self._has_begun = True
        waits_for, self._waits_for = self._waits_for, None
        return waits_for

    def throw(self, *error: Any) -> Any:
        if not self._has_begun:  # the task is cancelled before its first step, and knows nothing to cancel
            self._has_begun = True
            if isinstance(self._waits_for, asyncio.Future):
                self._waits_for.cancel()
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, None, None]:
        raise NotImplementedError("only a task runs this")
