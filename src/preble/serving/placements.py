"""Placements: the life of each one, from the choice of a replica to its one end.

Everything here is synchronous and runs in the event loop's thread, so nothing happens between reading the scheduler's
state and acting on it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from preble.config import EjectionConfig
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import Placement, ReplicaId, Request, RequestId
from preble.decisions.recent import DecisionRecord
from preble.engines.http import HttpClient
from preble.errors import EngineError, EngineFailed, EngineGone, EngineRefused, PrebleError
from preble.rules.callers import Caller
from preble.rules.ejection import EjectionTable
from preble.rules.quarantine import Quarantine, like_of
from preble.serving.placed import NOT_NOW, Placed
from preble.serving.replicas.live import LiveReplicas
from preble.serving.scheduler_timer import SchedulerTimer
from preble.serving.telemetry.metrics import Telemetry
from preble.serving.terms import Terms

ABORTED = "aborted"
_NOT_FOUND = 404
_LEAST_WAIT_S = 0.05
"""Beyond its prefill, roughly what a first byte takes."""


class PlacementObserver(Protocol):
    """Hears, after the scheduler, of what makes room for requests or takes it."""

    def replica_added(self, replica_id: ReplicaId) -> None: ...

    def replica_removed(self, replica_id: ReplicaId) -> None: ...

    def placed(self, placement: Placement, terms: Terms) -> None: ...

    def first_token(self, request_id: RequestId) -> None: ...

    def ended(self, request_id: RequestId, caller: Caller, output_tokens: int) -> None: ...


class Placements:
    """The placements that have not ended, and what is informed of each one. Use within one running event loop.

    `scheduler`: only to be read by others. `in_flight`: those whose replica is live.
    """

    def __init__(
        self, scheduler: GlobalScheduler, telemetry: Telemetry, ejection: EjectionConfig | None = None
    ) -> None:
        self.scheduler = scheduler
        self.telemetry = telemetry
        self.replicas = LiveReplicas()
        self.ejection = EjectionTable(ejection or EjectionConfig(), telemetry.standing_changed)
        self.timer = SchedulerTimer(scheduler, telemetry)
        self.quarantine = Quarantine()
        self.observer: PlacementObserver | None = None
        self.in_flight: dict[RequestId, LocalPlaced] = {}
        self.loop = asyncio.get_running_loop()
        self._lost: set[LocalPlaced] = set()
        """Those whose replica has left the rotation, and which may still end well there."""

    def running(self) -> Counter[HttpClient]:
        """Return how many requests run at each server, by its client. O(placements that have not ended)."""
        return Counter(placed.engine.http for placed in (*self.in_flight.values(), *self._lost))

    def sent(self, placement: Placement, terms: Terms, now: float) -> None:
        """A request goes to a replica, where its answer should begin after its prefill."""
        missed = placement.num_prompt_tokens - placement.matched_tokens
        expected_s = _LEAST_WAIT_S + self.scheduler.cost_model.prefill_s(missed, placement.matched_tokens)
        self.ejection.sent(placement.replica_id, placement.request_id, now, expected_s, streams=terms.streams)
        if self.observer is not None:
            self.observer.placed(placement, terms)

    def lost(self, request_id: RequestId, reason: str | None, silent_since: float | None) -> None:
        """The scheduler has forgotten a request whose replica has left the rotation. It may still end well there."""
        placed = self.in_flight.pop(request_id)
        placed._record.replica_lost = True
        self._lost.add(placed)
        if placed.on_lost is not None:
            placed.on_lost(reason, silent_since)

    def eject_outliers(self, now: float) -> None:
        """Eject replicas that are slow or begin no answer, and move requests that wait there.

        To be called every second or so. Requests whose answers come whole stay the first time, since they may be nearly
        done; they move when the replica has been tried again and still begins no answer.
        """
        last_heard: dict[ReplicaId, float] = {}
        for placed in self.in_flight.values():
            if (heard_at := placed.heard_at()) is not None:
                replica_id = placed.placement.replica_id
                last_heard[replica_id] = max(heard_at, last_heard.get(replica_id, heard_at))
        stalled = self.ejection.check(last_heard, now)
        hangs = {replica_id for replica_id in stalled if self.ejection.times_ejected(replica_id) > 1}
        for placed in list(self.in_flight.values()):
            moves = placed.placement.replica_id in (stalled if placed._terms.streams else hangs)
            if moves and placed.heard_at() is None and placed.on_lost is not None:
                placed._stalls = True
                placed.on_lost("it begins no answer", now)


class LocalPlaced(Placed):
    """A placement in the process that has the scheduler: reports go straight there."""

    __slots__ = (
        "_arrived_at",
        "_may_retry_freely",
        "_place_again",
        "_placements",
        "_record",
        "_request",
        "_stalls",
        "_terms",
        "model",
    )

    def __init__(
        self,
        placements: Placements,
        record: DecisionRecord,
        request: Request,
        terms: Terms,
        place_again: Callable[[Request, Terms, ReplicaId, bool], LocalPlaced],
    ) -> None:
        replica = placements.replicas[record.placement.replica_id]
        super().__init__(record.placement, replica.engine, record.placed_at)
        self.model = terms.model or next(iter(replica.info.models), "")
        self._placements = placements
        self._request = request
        self._terms = terms
        self._arrived_at = self.placed_at if terms.arrived_at is None else min(terms.arrived_at, self.placed_at)
        self._place_again = place_again
        self._record = record
        self._may_retry_freely = False
        self._stalls = False

    def answered(self, status: int, retry_after_s: float = 0.0) -> None:
        super().answered(status, retry_after_s)
        if status == _NOT_FOUND:  # perhaps it was restarted with another model
            self._placements.replicas.suspect(self.placement.replica_id)

    def first_token(self) -> None:
        placements, request_id, replica_id = self._placements, self.placement.request_id, self.placement.replica_id
        now = placements.loop.time()
        self._record.first_token_at = now
        since_s = (now - self._arrived_at, now - self._record.placed_at)
        placements.telemetry.first_byte(replica_id, self.model, self._terms.caller, *since_s)
        placements.ejection.heard(replica_id, request_id, now)
        if not self._record.replica_lost:
            placements.scheduler.on_first_token(request_id, now)
        if placements.observer is not None:
            placements.observer.first_token(request_id)

    def moved(self, to: ReplicaId) -> None:
        if self._has_ended:
            return
        placements, request_id, source = self._placements, self.placement.request_id, self.placement.replica_id
        engine = placements.replicas.engine(to)
        now = placements.loop.time()
        if not self._record.replica_lost:
            placements.scheduler.move(request_id, to, now)
            placements.timer.arm()
        placements.ejection.dropped(source, request_id, now)
        self.engine = engine
        self.placement = dataclasses.replace(self.placement, replica_id=to)
        placements.sent(self.placement, self._terms, now)
        placements.telemetry.moved(source, to, self.model)

    async def place_again(self) -> LocalPlaced:
        return self.placed_again()

    def placed_again(self) -> LocalPlaced:
        """As `place_again`, at once."""
        return self._place_again(self._request, self._terms, self.placement.replica_id, self._may_retry_freely)

    def _over(self, error: BaseException | None) -> None:
        status = self._status
        if error is None and status < 300:
            self._end("ok", None)
            return
        if error is None and status >= 500 and status not in NOT_NOW:
            replica_id = self.placement.replica_id
            text = f"replica {replica_id} answered with status {status}"
            error = EngineFailed(text, replica_id=replica_id)
        self._may_retry_freely = isinstance(error, EngineRefused)
        self._end(_outcome(error) if error is not None else "refused" if status in NOT_NOW else "rejected", error)

    def _end(self, outcome: str, error: BaseException | None) -> None:
        """Leave all that knows the placement, whichever of them fails."""
        placements = self._placements
        now = placements.loop.time()
        try:
            self._leave_scheduler(now)
        finally:
            try:
                self._judge_replica(outcome, error, now)
                self._report_end(outcome, now)
            finally:
                if placements.observer is not None:
                    placements.observer.ended(self.placement.request_id, self._terms.caller, self._output_tokens)

    def _leave_scheduler(self, now: float) -> None:
        placements, request_id = self._placements, self.placement.request_id
        if self._record.replica_lost:  # then the scheduler has forgotten it
            placements._lost.discard(self)
            return
        del placements.in_flight[request_id]
        placements.scheduler.on_finish(request_id, self._output_tokens, now, cached_tokens=self._cached_tokens)
        placements.timer.arm()

    def _report_end(self, outcome: str, now: float) -> None:
        output_tokens, cached_tokens = self._output_tokens, self._cached_tokens
        self._record.finished(now, outcome, output_tokens, cached_tokens)
        self._placements.telemetry.finished(
            self.placement,
            self.model,
            self._terms.caller,
            outcome=outcome,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
            e2e_s=now - self._arrived_at,
        )

    def _judge_replica(self, outcome: str, error: BaseException | None, now: float) -> None:
        """Report what this end says of the replica."""
        ejection = self._placements.ejection
        replica_id, request_id = self.placement.replica_id, self.placement.request_id
        self._judge_request(outcome, error, now)
        if isinstance(error, EngineError):
            ejection.failed(replica_id, request_id, now)
            self._placements.telemetry.engine_failed(replica_id, self.model, error)
            self._placements.replicas.suspect(replica_id)
        elif outcome == "ok":
            ejection.succeeded(replica_id, request_id, now)
        elif outcome == "refused":
            ejection.refused(replica_id, request_id, self._retry_after_s, now)
        else:
            ejection.dropped(replica_id, request_id, now)

    def _judge_request(self, outcome: str, error: BaseException | None, now: float) -> None:
        """Report what this end says of the request: whether its replica broke off before it answered."""
        quarantine = self._placements.quarantine
        has_begun = self._output_tokens > 0 or self._record.first_token_at is not None
        if isinstance(error, EngineGone) and self._request.keeps_kv and not has_begun and not self._stalls:
            quarantine.broke(
                like_of(self._request, self._terms.caller.name), self.placement.replica_id, self.placed_at, now
            )
        elif outcome == "ok" and quarantine:
            quarantine.answered(like_of(self._request, self._terms.caller.name))


def _outcome(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return ABORTED
    return type(error).__name__ if isinstance(error, (PrebleError, TimeoutError)) else "error"
