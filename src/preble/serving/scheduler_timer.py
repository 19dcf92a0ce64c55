"""The scheduler's timer, on the event loop."""

from __future__ import annotations

import asyncio

from preble.core.placing.scheduler import GlobalScheduler
from preble.serving.telemetry.metrics import Telemetry


class SchedulerTimer:
    """Calls the scheduler at the time that it asks for. Call `arm` after each change of the scheduler's state."""

    def __init__(self, scheduler: GlobalScheduler, telemetry: Telemetry) -> None:
        self._scheduler = scheduler
        self._telemetry = telemetry
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.Handle | None = None
        self._due_at = 0.0

    def arm(self) -> None:
        """Have the scheduler called at its next timer."""
        when = self._scheduler.next_timer()
        if self._handle is not None:
            if when is not None and when >= self._due_at:
                return
            self._handle.cancel()
        # Kept beside the handle: for a time in the past, uvloop gives a handle that does not know its time.
        self._due_at = when or 0.0
        self._handle = None if when is None else self._loop.call_at(when, self._run)

    def _run(self) -> None:
        self._handle = None
        self._telemetry.prefixes_replicated(self._scheduler.on_timer(self._loop.time()))
        self.arm()

    def close(self) -> None:
        """Stop the timer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
