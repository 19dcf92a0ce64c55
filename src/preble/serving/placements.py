"""Placements: each request's replica chosen, the placements that have not ended, and who hears of each one.

Everything here is synchronous and runs in the event loop's thread, so nothing happens between reading the scheduler's
state and acting on it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import structlog

from preble.config import EjectionConfig, RetryConfig
from preble.core.placing.promises import Forecast
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import Placement, ReplicaId, Request, RequestId
from preble.core.types.life import (
    Alive,
    Ended,
    Fact,
    FirstToken,
    Lost,
    Moved,
    Outcome,
    Started,
    TransferFailed,
    Transferred,
)
from preble.decisions.recent import RecentDecisions
from preble.engines.http import HttpClient
from preble.engines.pairs import PairedEngine
from preble.errors import NoReplicaError, Quarantined
from preble.rules.ejection import EjectionTable
from preble.rules.retries import QUARANTINE_S, Quarantine, RetryBudget, like_of
from preble.serving.copies import Copies
from preble.serving.placed import LocalPlaced, engine_for
from preble.serving.replicas.live import LiveReplicas
from preble.serving.telemetry.metrics import Telemetry
from preble.serving.terms import Terms


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
            # Of a split the answer says what the other replica had.
            cached = None if placed.placement.prefill_source is not None else fact.cached_tokens
            self._scheduler.on_finish(request_id, fact.output_tokens or 0, now, cached_tokens=cached)
        elif isinstance(fact, Moved):
            self._scheduler.move(request_id, fact.replica_id, now)
        elif isinstance(fact, Transferred):
            self._scheduler.on_transferred(request_id, now)
        elif isinstance(fact, TransferFailed):
            self._scheduler.on_transfer_failed(request_id, now, kept_s=fact.kept_s)
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


_LEAST_WAIT_S = 0.05
"""Beyond its prefill, roughly what a first byte takes."""


Kind = type[Fact] | Outcome
"""What a listener asks for: a kind of fact, or of `Ended` one outcome only."""
_FAILURES = (Outcome.REJECTED, *(outcome for outcome in Outcome if outcome.blames_replica))


class PlacementListener(Protocol):
    """Hears of every placement: of the kinds of facts that it asks for."""

    def on(self, placed: LocalPlaced, fact: Fact, now: float) -> None:
        """A fact about a placement: `Started` first, one `Ended` last. Of a move `placed` has the new replica."""


class Placements:
    """The placements that have not ended. Who follows them hears of each kind of fact in the order of `listen`.

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
        self.copies = Copies(scheduler, self.replicas, self)
        self.ejection = EjectionTable(ejection or EjectionConfig(), telemetry.standing_changed, self._expected_s)
        self.timer = SchedulerTimer(scheduler, telemetry)
        self.quarantine = Quarantine()
        self.in_flight: dict[RequestId, LocalPlaced] = {}
        self.loop = asyncio.get_running_loop()
        self._lost: set[LocalPlaced] = set()
        """Those whose replica has left the rotation, and which may still end well there."""
        self._listeners: dict[Kind, list[PlacementListener]] = {
            kind: [] for kind in (Started, Transferred, TransferFailed, FirstToken, Moved, Lost, Alive, *Outcome)
        }
        self.listen(self.timer, Started, Transferred, TransferFailed, FirstToken, Moved, Ended)
        self.listen(self.ejection, Started, Transferred, TransferFailed, FirstToken, Moved, Ended)
        self.listen(self.quarantine, Ended)
        self.listen(self.replicas, TransferFailed, *_FAILURES)
        self.listen(recent, Started, Transferred, TransferFailed, FirstToken, Lost, Ended)
        self.listen(telemetry, Started, Transferred, TransferFailed, FirstToken, Moved, Ended)

    def listen(self, listener: PlacementListener, *kinds: Kind) -> None:
        """Let one more hear of facts of these kinds from now on, after those that hear already."""
        for kind in kinds:
            for one in Outcome if kind is Ended else (kind,):
                self._listeners[one].append(listener)

    def leave(self, listener: PlacementListener) -> None:
        """Let one that hears hear no more."""
        for kind, listeners in self._listeners.items():
            self._listeners[kind] = [other for other in listeners if other is not listener]

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
        kind: Kind = type(fact)
        if isinstance(fact, Ended):
            kind = fact.outcome
            if placed.is_lost:
                self._lost.discard(placed)
            else:
                del self.in_flight[placed.placement.request_id]
        now = self.loop.time()
        failure: BaseException | None = None
        for listener in self._listeners[kind]:
            try:
                listener.on(placed, fact, now)
            except BaseException as error:  # noqa: BLE001 (whoever fails, the others must let go of it)
                failure = failure or error
        if failure is not None:
            raise failure

    def _expected_s(self, placement: Placement) -> float:
        """Return what the beginning of an answer should take, without a queue."""
        missed = placement.num_prompt_tokens - placement.matched_tokens
        return _LEAST_WAIT_S + self.scheduler.cost_model.prefill_s(missed, placement.matched_tokens)

    def running(self) -> Counter[HttpClient]:
        """Return how many requests run at each server, by its client, and copies from it; those of a pair at both.

        O(placements not ended).
        """
        engines = [placed.engine for placed in (*self.in_flight.values(), *self._lost)]
        sources = (engine.prefill.http for engine in engines if isinstance(engine, PairedEngine))
        return Counter(engine.http for engine in engines) + Counter(sources) + self.copies.sending()

    def lose(self, replica_id: ReplicaId, orphans: Sequence[Request], loss: Lost) -> None:
        """A replica has left the rotation. The scheduler has forgotten its requests, which may still end well there.

        What it computes for others is begun anew, unless it has left by our own will.
        Raises: what one of their listeners raises, after all have heard.
        """
        with ExitStack() as losses:
            for request in reversed(orphans):  # who came first hears first: a stack begins with its last one
                placed = self.in_flight.pop(request.request_id)
                self._lost.add(placed)
                losses.callback(placed.leave, loss)
            if loss.reason is not None:
                of_source = Lost(loss.reason, of_source=True)
                for placed in self.in_flight.values():
                    if placed.placement.prefill_source == replica_id:
                        losses.callback(placed.lose, of_source)

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


class Dispatcher:
    """Chooses each request's replica with the scheduler, and places failed requests again."""

    def __init__(self, placements: Placements, retries: RetryConfig | None = None) -> None:
        self.placements = placements
        self.replicas = placements.replicas
        self._scheduler = placements.scheduler
        self._ejection = placements.ejection
        self._telemetry = placements.telemetry
        self.retries = RetryBudget(retries or RetryConfig())
        self._loop = asyncio.get_running_loop()

    def place(self, request: Request, terms: Terms) -> LocalPlaced:
        """Place a request on a replica that serves its model. The caller must end the placement.

        Raises: NoReplicaError, PromptTooLong, UnknownModel. Quarantined: replicas have died of its like.
        """
        self.retries.placed(self._loop.time())
        return self._place(request, terms)

    def _place_again(self, request: Request, terms: Terms, tried: ReplicaId, is_free: bool) -> LocalPlaced:
        """See `Placed.place_again`."""
        now = self._loop.time()
        if not is_free and not self.retries.allows_one(now):
            self._telemetry.retry_denied()
            raise NoReplicaError("too many requests move to other replicas (`retries.share`)")
        again = self._place(_avoiding(request, frozenset((tried,))), terms)
        if not is_free:
            self.retries.placed_again(now)
        self._telemetry.placed_again(tried, again.model)
        return again

    def _place(self, request: Request, terms: Terms) -> LocalPlaced:
        now, started = self._loop.time(), time.perf_counter()
        if self.placements.quarantine.suspects:
            self._refuse_deadly(request, terms, now)
        request, others = self._of_model(request, terms)
        placement = self._chosen(request, others, now)
        took_s = time.perf_counter() - started
        try:
            placed = self._placed(request, placement, terms, now)
        except BaseException:
            self._scheduler.on_finish(request.request_id, 0, now)
            raise
        self.placements.start(placed, took_s)
        return placed

    def forecast(self, request: Request, terms: Terms) -> Forecast:
        """Return what the request could have at best if it were placed now. Raises: as `place`."""
        now = self._loop.time()
        request, others = self._of_model(request, terms)
        away = others | self._ejection.avoided(now)
        try:
            return self._scheduler.forecast(_avoiding(request, away) if away else request, now)
        except NoReplicaError:
            return self._scheduler.forecast(_avoiding(request, others), now)

    def _of_model(self, request: Request, terms: Terms) -> tuple[Request, frozenset[ReplicaId]]:
        """Return the request as the scheduler gets it, and the replicas of other models or drained ones."""
        of_model = self.replicas.of_model(terms.model)
        if of_model.base_model != request.model:
            request = dataclasses.replace(request, model=of_model.base_model)
        held_back = self.replicas.held_back
        return request, of_model.others | held_back if held_back else of_model.others

    def _refuse_deadly(self, request: Request, terms: Terms, now: float) -> None:
        """Raises: Quarantined: replicas have died of such a request."""
        if died := self.placements.quarantine.held(like_of(request, terms.caller.name), now):
            structlog.get_logger().warning("request_quarantined", request=request.request_id, died=died)
            text = f"two replicas ended while they worked on this request; it is refused for {QUARANTINE_S:g} s"
            raise Quarantined(f"{text}, and so is every one like it")

    def _placed(self, request: Request, placement: Placement, terms: Terms, now: float) -> LocalPlaced:
        replica = self.replicas[placement.replica_id]
        return LocalPlaced(
            placement,
            engine_for(placement, self.replicas.engine),
            now,
            request=request,
            terms=terms,
            model=terms.model or next(iter(replica.info.models), ""),
            table=self.placements,
            place_again=self._place_again,
        )

    def _chosen(self, request: Request, others: frozenset[ReplicaId], now: float) -> Placement:
        """Place, if possible on a replica that is not ejected. `others`: replicas of other models, or drained."""
        avoided = self._ejection.avoided(now) if self._ejection.suspended else frozenset[ReplicaId]()
        away = others | avoided
        try:
            return self._scheduler.place(_avoiding(request, away) if away else request, now)
        except NoReplicaError as error:
            if not avoided:
                raise
            candidates = self.replicas.keys() - others - request.avoid
            held = self._ejection.held(candidates, now)
            if candidates and len(held) == len(candidates):
                text = "every replica asks for time before further requests"
                raise NoReplicaError(text, retry_after_s=min(held.values())) from error
            return self._scheduler.place(_avoiding(request, others | held.keys()), now)


def _avoiding(request: Request, replicas: frozenset[ReplicaId]) -> Request:
    return dataclasses.replace(request, avoid=request.avoid | replicas)
