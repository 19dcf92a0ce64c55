"""The scheduler on the event loop: it hears of placements, and is called at the time that it asks for."""

from __future__ import annotations

import asyncio

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types.life import Ended, Fact, FirstToken, Moved
from preble.serving.placed import LocalPlaced
from preble.serving.telemetry.metrics import Telemetry


class SchedulerTimer:
    """Calls the scheduler at the time that it asks for. Call `arm` after each change that is no placement's."""

    def __init__(self, scheduler: GlobalScheduler, telemetry: Telemetry) -> None:
        self._scheduler = scheduler
        self._telemetry = telemetry
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.Handle | None = None
        self._due_at = 0.0

    def on(self, placed: LocalPlaced, fact: Fact, now: float) -> None:
        """Tell the scheduler, unless it has forgotten the placement with its replica."""
        if placed.is_lost:
            return
        request_id = placed.placement.request_id
        if isinstance(fact, FirstToken):
            self._scheduler.on_first_token(request_id, now)
            return
        if isinstance(fact, Ended):
            self._scheduler.on_finish(request_id, fact.output_tokens or 0, now, cached_tokens=fact.cached_tokens)
        elif isinstance(fact, Moved):
            self._scheduler.move(request_id, fact.replica_id, now)
        self.arm()

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
