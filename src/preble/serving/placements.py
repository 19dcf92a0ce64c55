"""The placements that have not ended, and who hears of each one.

Everything here is synchronous and runs in the event loop's thread, so nothing happens between reading the scheduler's
state and acting on it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Protocol

from preble.config import EjectionConfig
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import Placement, ReplicaId, RequestId
from preble.core.types.life import Ended, Fact, Lost, Started
from preble.decisions.recent import RecentDecisions
from preble.engines import Engine
from preble.engines.http import HttpClient
from preble.rules.ejection import EjectionTable
from preble.rules.quarantine import Quarantine
from preble.serving.placed import LocalPlaced
from preble.serving.replicas.live import LiveReplicas
from preble.serving.scheduler_timer import SchedulerTimer
from preble.serving.telemetry.metrics import Telemetry

_LEAST_WAIT_S = 0.05
"""Beyond its prefill, roughly what a first byte takes."""


class PlacementListener(Protocol):
    """Hears of every placement."""

    def on(self, placed: LocalPlaced, fact: Fact, now: float) -> None:
        """A fact about a placement: `Started` first, one `Ended` last. Of a move `placed` has the new replica."""


class Placements:
    """The placements that have not ended. Whoever follows them is in one list, in the order in which they hear.

    Use within one running event loop. `scheduler`: only to be read by others. `recent`: the last decisions.
    `in_flight`: placements whose replica is live.
    """

    def __init__(
        self,
        scheduler: GlobalScheduler,
        telemetry: Telemetry,
        recent: RecentDecisions,
        ejection: EjectionConfig | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.telemetry = telemetry
        self.recent = recent
        self.replicas = LiveReplicas()
        self.ejection = EjectionTable(ejection or EjectionConfig(), telemetry.standing_changed, self._expected_s)
        self.timer = SchedulerTimer(scheduler, telemetry)
        self.quarantine = Quarantine()
        self.in_flight: dict[RequestId, LocalPlaced] = {}
        self.loop = asyncio.get_running_loop()
        self._lost: set[LocalPlaced] = set()
        """Those whose replica has left the rotation, and which may still end well there."""
        self._listeners: list[PlacementListener] = [
            self.timer,
            self.ejection,
            self.quarantine,
            self.replicas,
            recent,
            telemetry,
        ]

    def listen(self, listener: PlacementListener) -> None:
        """Let one more hear of what happens from now on."""
        self._listeners.append(listener)

    def start(self, placed: LocalPlaced, took_s: float) -> None:
        """A request goes to its replica. It is ended if somebody cannot take that. `took_s`: for the decision."""
        self.in_flight[placed.placement.request_id] = placed
        try:
            self.tell(placed, Started(took_s))
        except BaseException as error:
            placed.end(error)  # nobody gets it to end it
            raise

    def tell(self, placed: LocalPlaced, fact: Fact) -> None:
        """Let all listeners hear. Raises: what the first that fails raises, after the others have heard."""
        if isinstance(fact, Ended):
            if placed.is_lost:
                self._lost.discard(placed)
            else:
                del self.in_flight[placed.placement.request_id]
        now = self.loop.time()
        failure: BaseException | None = None
        for listener in self._listeners:
            try:
                listener.on(placed, fact, now)
            except BaseException as error:  # noqa: BLE001 (whoever fails, the others must let go of it)
                failure = failure or error
        if failure is not None:
            raise failure

    def engine(self, replica_id: ReplicaId) -> Engine:
        """Return a live replica's client. Raises: NoReplicaError: it is not live."""
        return self.replicas.engine(replica_id)

    def _expected_s(self, placement: Placement) -> float:
        """Return what the beginning of an answer should take, without a queue."""
        missed = placement.num_prompt_tokens - placement.matched_tokens
        return _LEAST_WAIT_S + self.scheduler.cost_model.prefill_s(missed, placement.matched_tokens)

    def running(self) -> Counter[HttpClient]:
        """Return how many requests run at each server, by its client. O(placements that have not ended)."""
        return Counter(placed.engine.http for placed in (*self.in_flight.values(), *self._lost))

    def lose(self, request_id: RequestId, loss: Lost) -> None:
        """The scheduler has forgotten a request whose replica has left the rotation. It may still end well there."""
        placed = self.in_flight.pop(request_id)
        self._lost.add(placed)
        placed.leave(loss)

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
            moves = placed.placement.replica_id in (stalled if placed.terms.streams else hangs)
            if moves and placed.heard_at() is None:
                placed.stall(now)
