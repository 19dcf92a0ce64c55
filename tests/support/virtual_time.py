"""An event loop without waiting: its clock stands still while there is something to do, and then jumps."""

from __future__ import annotations

import asyncio
import selectors
from contextvars import Context
from heapq import heappop, heappush
from typing import Any


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Where nothing is left to do at one time, it is the time of the next timer, exactly.

    For code that waits by timers only. Use it as the `loop_factory` of an `asyncio.Runner`.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[float] = []
        super().__init__(_NeverWaiting(self._jump))

    def time(self) -> float:
        return self._now

    def move_to(self, time_s: float) -> None:
        """It is `time_s` now. Timers that are due by that run when the loop is next given control."""
        assert time_s >= self._now, f"time cannot go back from {self._now} to {time_s}"
        self._now = time_s

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        heappush(self._timers, when)
        return super().call_at(when, callback, *args, context=context)

    def _jump(self) -> None:
        while self._timers and self._timers[0] <= self._now:
            heappop(self._timers)
        if not self._timers:
            raise RuntimeError("everything waits, and not for a time")
        self._now = self._timers[0]


class _NeverWaiting(selectors.DefaultSelector):
    """Calls `on_wait` where a selector would wait."""

    def __init__(self, on_wait: Any) -> None:
        super().__init__()
        self._on_wait = on_wait

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and (timeout is None or timeout > 0):
            self._on_wait()
        return found
