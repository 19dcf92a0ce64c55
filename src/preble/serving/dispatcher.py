"""The one place that touches the scheduler: placements and their ends, cache events, replicas, timers.

Everything here is synchronous and runs in the event loop's thread, so nothing happens between reading the scheduler's
state and acting on it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Protocol

from preble.config import EjectionConfig, RetryConfig
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import (
    BlocksEvicted,
    BlocksStored,
    CacheCleared,
    EventsLost,
    KvEvent,
    Placement,
    ReplicaId,
    Request,
    RequestId,
)
from preble.decisions.recent import DecisionRecord, RecentDecisions
from preble.engines.adapter import Engine, EngineInfo, ModelNames
from preble.errors import EngineError, EngineFailed, EngineRefused, NoReplicaError, PrebleError
from preble.serving.callers import ANYBODY, Caller
from preble.serving.replicas.ejection import EjectionTable
from preble.serving.replicas.live import LiveReplica, LiveReplicas
from preble.serving.retry_budget import RetryBudget
from preble.serving.telemetry.metrics import Telemetry

NOT_NOW = frozenset({429, 503})
"""Statuses with which a replica refuses work that another may take."""

ABORTED = "aborted"
_NOT_FOUND = 404
_SECONDS_PER_TOKEN = 1e-4
_LEAST_WAIT_S = 0.05
"""Roughly what a first byte takes, to compare replicas that got prompts of different lengths."""


class Placed:
    """One placement, from `Serving.place` to its end. The carrier of the bytes reports what happens to the request.

    Exactly one end counts: the first of `end`, `failed` and `cancelled`. Later ones change nothing.

    `placement`: the replica, and why. `engine`: the client of that replica. `on_lost`: called once if the replica
    leaves the rotation before the end, with the reason and the time since when its machine has been silent; that time
    is None if the machine still answers or refuses, since connections to it then break by themselves. It is also called
    if the request streams and the replica is ejected because it begins no answer. `heard_at`: asked now and then, when
    anything of the answer last came, by the event loop's clock; None for nothing yet.
    """

    __slots__ = (
        "_cached_tokens",
        "_caller",
        "_dispatcher",
        "_has_ended",
        "_is_lost",
        "_may_retry_freely",
        "_model",
        "_output_tokens",
        "_placed_at",
        "_record",
        "_request",
        "_retry_after_s",
        "_status",
        "_streams",
        "engine",
        "heard_at",
        "on_lost",
        "placement",
    )

    def __init__(
        self,
        dispatcher: Dispatcher,
        request: Request,
        model: str | None,
        placement: Placement,
        engine: Engine,
        record: DecisionRecord,
        caller: Caller,
        streams: bool,
    ) -> None:
        self.placement = placement
        self.engine = engine
        self.on_lost: Callable[[str | None, float | None], None] | None = None
        self.heard_at: Callable[[], float | None] = lambda: None
        self._dispatcher = dispatcher
        self._request = request
        self._model = model
        self._record = record
        self._caller = caller
        self._streams = streams
        self._placed_at = record.placed_at
        self._output_tokens = 0
        self._cached_tokens: int | None = None
        self._is_lost = False
        self._has_ended = False
        self._status = 200
        self._retry_after_s = 0.0
        self._may_retry_freely = False

    def answered(self, status: int, retry_after_s: float = 0.0) -> None:
        """The replica has begun its answer with this HTTP status. `retry_after_s`: from its `Retry-After` header."""
        self._status = status
        self._retry_after_s = retry_after_s
        if status == _NOT_FOUND:  # perhaps it was restarted with another model
            self._dispatcher.replicas.suspect(self.placement.replica_id)

    def first_token(self) -> None:
        """The first token of a streamed answer has arrived: the prefill is over."""
        self._dispatcher.first_token(self)

    def usage(self, output_tokens: int, cached_tokens: int | None = None) -> None:
        """The tokens so far: generated, and cached by the replica (None if not reported). The last call counts."""
        self._output_tokens = output_tokens
        self._cached_tokens = cached_tokens

    def end(self) -> None:
        """The answer is complete. With an error status it is no success: see `answered`."""
        if self._status in NOT_NOW:
            self._end("refused")
        elif self._status >= 500:
            replica_id = self.placement.replica_id
            text = f"replica {replica_id} answered with status {self._status}"
            self.failed(EngineFailed(text, replica_id=replica_id))
        else:
            self._end("ok" if self._status < 400 else "rejected")

    def cancelled(self) -> None:
        """The client has gone, or the work was stopped for another reason that is not the replica's."""
        self._end(ABORTED)

    def failed(self, error: BaseException) -> None:
        """The request failed. An `EngineError` also counts as the replica's failure and has it checked at once."""
        if isinstance(error, EngineError) and not self._has_ended:
            self._may_retry_freely = isinstance(error, EngineRefused)
            self._dispatcher.engine_failed(self.placement.replica_id, error)
        self._end(_outcome(error), is_engines_failure=isinstance(error, EngineError))

    def _end(self, outcome: str, *, is_engines_failure: bool = False) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._dispatcher.finish(self, outcome, is_engines_failure=is_engines_failure)

    def moved(self, to: ReplicaId) -> None:
        """The carrier has sent the request to another replica. Raises: NoReplicaError: that one is not live."""
        if not self._has_ended:
            self._dispatcher.moved(self, to)

    def place_again(self) -> Placed:
        """Place the request on a replica that it has not tried. Call it after the end of this placement.

        Only a request whose replica could not be reached is outside the fleet's retry budget.
        Raises: NoReplicaError: there is none, or the budget is spent. PromptTooLong, UnknownModel.
        """
        return self._dispatcher.place_again(self, is_free=self._may_retry_freely)


class PlacementObserver(Protocol):
    """Told, after the scheduler, of what makes room for requests or takes it."""

    def replica_added(self, replica_id: ReplicaId) -> None: ...

    def replica_removed(self, replica_id: ReplicaId) -> None: ...

    def placed(self, placement: Placement, caller: Caller, *, streams: bool) -> None: ...

    def first_token(self, request_id: RequestId) -> None: ...

    def ended(self, request_id: RequestId, caller: Caller, output_tokens: int) -> None: ...


def _outcome(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return ABORTED
    return type(error).__name__ if isinstance(error, (PrebleError, TimeoutError)) else "error"


def _avoiding(request: Request, replicas: frozenset[ReplicaId]) -> Request:
    return dataclasses.replace(request, avoid=request.avoid | replicas) if replicas else request


class Dispatcher:
    """Owns the scheduler and the table of live replicas. Use within one running event loop."""

    def __init__(
        self,
        scheduler: GlobalScheduler,
        telemetry: Telemetry,
        recent: RecentDecisions,
        *,
        ejection: EjectionConfig | None = None,
        retries: RetryConfig | None = None,
    ) -> None:
        self.scheduler = scheduler
        """Only to be read by others."""
        self.recent = recent
        self.replicas = LiveReplicas()
        self.observer: PlacementObserver | None = None
        self.ejection = EjectionTable(ejection or EjectionConfig(), telemetry.standing_changed)
        self._retries = RetryBudget(retries or RetryConfig())
        self._telemetry = telemetry
        self._loop = asyncio.get_running_loop()
        self._in_flight: dict[RequestId, Placed] = {}
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0

    @property
    def num_in_flight(self) -> int:
        """Placements that have not ended."""
        return len(self._in_flight)

    # requests

    def place(
        self, request: Request, model: str | None = None, *, caller: Caller = ANYBODY, streams: bool = True
    ) -> Placed:
        """Place a request among the replicas that serve `model`. The caller must end the result.

        `streams`: whether `first_token` will be called. Raises: NoReplicaError, PromptTooLong, UnknownModel.
        """
        self._retries.placed(self._loop.time())
        return self._place(request, model, caller, streams)

    def place_again(self, placed: Placed, *, is_free: bool) -> Placed:
        """See `Placed.place_again`."""
        replica_id = placed.placement.replica_id
        now = self._loop.time()
        if not is_free and not self._retries.allows_one(now):
            self._telemetry.retries_denied.inc()
            raise NoReplicaError("too many requests move to other replicas (`retries.share`)")
        request = _avoiding(placed._request, frozenset((replica_id,)))
        again = self._place(request, placed._model, placed._caller, placed._streams)
        if not is_free:
            self._retries.placed_again(now)
        self._telemetry.moves.labels(replica_id).inc()
        return again

    def _place(self, request: Request, model: str | None, caller: Caller, streams: bool) -> Placed:
        now, started = self._loop.time(), time.perf_counter()
        others = self.replicas.not_serving(model)
        request = dataclasses.replace(request, model=self.replicas.base_model(others))
        placement = self._chosen(request, others, now)
        took_s = time.perf_counter() - started
        try:
            engine = self.replicas[placement.replica_id].engine
            record = self.recent.placed(placement, now)
            placed = Placed(self, request, model, placement, engine, record, caller, streams)
            self._in_flight[request.request_id] = placed
            self._arm()
            missed = placement.num_prompt_tokens - placement.matched_tokens
            expected_s = _LEAST_WAIT_S + _SECONDS_PER_TOKEN * missed
            self.ejection.sent(placement.replica_id, request.request_id, now, expected_s, streams=streams)
            self._telemetry.placed(placement, took_s)
            if self.observer is not None:
                self.observer.placed(placement, caller, streams=streams)
        except BaseException:
            # Nobody gets this placement to end it.
            self._in_flight.pop(request.request_id, None)
            self.ejection.dropped(placement.replica_id, request.request_id, now)
            self.scheduler.on_finish(request.request_id, 0, now)
            raise
        return placed

    def _chosen(self, request: Request, others: frozenset[ReplicaId], now: float) -> Placement:
        """Place, if possible on a replica that is not ejected. `others`: replicas of other models."""
        avoided = self.ejection.avoided(now)
        try:
            return self.scheduler.place(_avoiding(request, others | avoided), now)
        except NoReplicaError as error:
            if not avoided:
                raise
            candidates = self.replicas.keys() - others - request.avoid
            if (retry_after_s := self.ejection.retry_after_s(candidates, now)) is not None:
                text = "every replica asks for time before further requests"
                raise NoReplicaError(text, retry_after_s=retry_after_s) from error
            return self.scheduler.place(_avoiding(request, others), now)

    def moved(self, placed: Placed, to: ReplicaId) -> None:
        """See `Placed.moved`."""
        source = placed.placement.replica_id
        engine = self.replicas.engine(to)
        if not placed._is_lost:
            self.scheduler.move(placed._request.request_id, to, self._loop.time())
            self._arm()
        now, request_id = self._loop.time(), placed._request.request_id
        self.ejection.dropped(source, request_id, now)
        self.ejection.sent(to, request_id, now, streams=placed._streams)
        placed.engine = engine
        placed.placement = dataclasses.replace(placed.placement, replica_id=to)
        self._telemetry.moved(source, to)

    def first_token(self, placed: Placed) -> None:
        """See `Placed.first_token`."""
        now, replica_id = self._loop.time(), placed.placement.replica_id
        placed._record.first_token_at = now
        self._telemetry.first_byte(replica_id, now - placed._placed_at)
        self.ejection.heard(replica_id, placed._request.request_id, now)
        if not placed._is_lost:
            self.scheduler.on_first_token(placed._request.request_id, now)
        if self.observer is not None:
            self.observer.first_token(placed._request.request_id)

    def finish(self, placed: Placed, outcome: str, *, is_engines_failure: bool) -> None:
        """See `Placed.end`."""
        now = self._loop.time()
        output_tokens, cached_tokens = placed._output_tokens, placed._cached_tokens
        if not placed._is_lost:
            del self._in_flight[placed._request.request_id]
            self.scheduler.on_finish(placed._request.request_id, output_tokens, now, cached_tokens=cached_tokens)
            self._arm()
        self._judge(placed, outcome, is_engines_failure, now)
        placed._record.finished(now, outcome, output_tokens, cached_tokens)
        self._telemetry.finished(
            placed.placement,
            outcome=outcome,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
            e2e_s=now - placed._placed_at,
        )
        if placed._caller.name:
            tokens = (placed.placement.num_prompt_tokens, cached_tokens or 0, output_tokens)
            self._telemetry.key_used(placed._caller.name, *tokens)
        if self.observer is not None:
            self.observer.ended(placed._request.request_id, placed._caller, output_tokens)

    def _judge(self, placed: Placed, outcome: str, is_engines_failure: bool, now: float) -> None:
        """What the end says of the replica."""
        replica_id, request_id = placed.placement.replica_id, placed._request.request_id
        if is_engines_failure:
            self.ejection.failed(replica_id, request_id, now)
        elif outcome == "ok":
            self.ejection.succeeded(replica_id, request_id, now)
        elif outcome == "refused":
            self.ejection.refused(replica_id, request_id, placed._retry_after_s, now)
        else:
            self.ejection.dropped(replica_id, request_id, now)

    def engine_failed(self, replica_id: ReplicaId, error: EngineError) -> None:
        """Count a replica's failure and have it checked at once."""
        self._telemetry.engine_failed(replica_id, error)
        self.replicas.suspect(replica_id)

    def eject_outliers(self) -> None:
        """Eject replicas that are slow or begin no answer, and move streams that wait there.

        To be called every second or so. Requests whose answers come whole stay: they may be nearly done, and those that
        hang time out.
        """
        last_heard: dict[ReplicaId, float] = {}
        for placed in self._in_flight.values():
            if (heard_at := placed.heard_at()) is not None:
                replica_id = placed.placement.replica_id
                last_heard[replica_id] = max(heard_at, last_heard.get(replica_id, heard_at))
        stalled = self.ejection.check(last_heard, self._loop.time())
        for placed in list(self._in_flight.values()):
            waits = placed._streams and placed.heard_at() is None
            if waits and placed.placement.replica_id in stalled and placed.on_lost is not None:
                placed.on_lost("it begins no answer", self._loop.time())

    # replicas

    def add_replica(self, engine: Engine, info: EngineInfo, suspect: asyncio.Event | None = None) -> LiveReplica:
        """Take a replica into the rotation. `suspect`: as `LiveReplica`'s, shared by the ranks of one server."""
        replica_id = engine.replica_id
        info = self.replicas.with_base_model(info)
        self.scheduler.add_replica(info.spec, self._loop.time())
        self.replicas.add(replica := LiveReplica(engine, info, suspect=suspect or asyncio.Event()))
        self.ejection.add(replica_id, info.models)
        self._arm()
        self._telemetry.replica_up(
            replica_id, engine=info.engine, version=info.version, models=info.models, events=info.spec.reports_events
        )
        if self.observer is not None:
            self.observer.replica_added(replica_id)
        return replica

    def set_models(self, replica: LiveReplica, names: ModelNames) -> None:
        """A live replica has loaded or unloaded adapters or further models."""
        self.replicas.set_models(replica, names)
        self.ejection.set_group(replica.engine.replica_id, names.models)
        self._telemetry.models_changed(replica.engine.replica_id, names.models)

    def remove_replica(self, replica_id: ReplicaId, reason: str | None, *, silent_since: float | None = None) -> None:
        """Take a replica out of the rotation. The scheduler forgets its requests, which may still end well there.

        `silent_since`: since when its machine is silent; None where it still answers or refuses. See `Placed.on_lost`.
        """
        orphans = self.scheduler.remove_replica(replica_id, self._loop.time())
        for request in orphans:
            placed = self._in_flight.pop(request.request_id)
            placed._is_lost = placed._record.replica_lost = True
            if placed.on_lost is not None:
                placed.on_lost(reason, silent_since)
        self.replicas.remove(replica_id)
        self.ejection.remove(replica_id)
        self._arm()
        self._telemetry.replica_down(replica_id, reason, len(orphans))
        if self.observer is not None:
            self.observer.replica_removed(replica_id)

    def set_trust(self, replica: LiveReplica, trusted: bool) -> None:
        """Have matches on a replica count or not. Nothing happens if it has left the rotation."""
        replica_id = replica.engine.replica_id
        if self.replicas.get(replica_id) is replica and replica.trusted != trusted:
            self.scheduler.set_trust(replica_id, trusted, self._loop.time())
            replica.trusted = trusted

    def apply(self, event: KvEvent) -> None:
        """Give the scheduler a change of a live replica's cache."""
        self._telemetry.kv_events.labels(event.replica_id, type(event).__name__).inc()
        if isinstance(event, BlocksStored):
            if event.block_size != (replica := self.replicas[event.replica_id]).info.spec.block_size:
                self._learn_block_size(replica, event.block_size)
            if not self.scheduler.on_stored(event, self._loop.time()):
                self._count_unlocated(event)
        else:
            self.scheduler.on_evicted(event, self._loop.time())
            self._note_events(event)
        self._arm()

    def _learn_block_size(self, replica: LiveReplica, block_size: int) -> None:
        """A replica's events are of other blocks than it says: decode context parallelism, several cache groups."""
        if replica.engine.learn_block_size(block_size):
            self._telemetry.block_size_learned(replica.engine.replica_id, block_size)
            replica.suspect.set()  # so that it joins again with that size

    def _note_events(self, event: BlocksEvicted | CacheCleared | EventsLost) -> None:
        """Note whether the replica's events arrive: each time that they do again, its cache is first cleared."""
        replica, lost = self.replicas.get(event.replica_id), isinstance(event, EventsLost)
        if replica is not None and replica.has_lost_events != lost and not isinstance(event, BlocksEvicted):
            replica.has_lost_events = lost
            self._telemetry.events_lost(event.replica_id, lost=lost)
            if lost:
                # It may have restarted between two checks and publish elsewhere now.
                replica.suspect.set()

    def _count_unlocated(self, event: BlocksStored) -> None:
        """Count an event with an unknown parent. If the stream knows it, have the stream start over, with backoff."""
        replica_id = event.replica_id
        self._telemetry.unlocated.labels(replica_id).inc()
        if event.is_orphan:
            return
        replica = self.replicas[replica_id]
        if replica.resync_backoff.is_due(self._loop.time()):
            self._telemetry.resynced(replica_id)
            replica.engine.resync_kv_events()

    # timers

    def _arm(self) -> None:
        """Have `_on_timer` called at the scheduler's next timer."""
        when = self.scheduler.next_timer()
        if self._timer is not None:
            if when is not None and when >= self._timer_at:
                return
            self._timer.cancel()
        # Kept beside the handle: for a time in the past, uvloop gives a handle that does not know its time.
        self._timer_at = when or 0.0
        self._timer = None if when is None else self._loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._telemetry.prefixes_replicated(self.scheduler.on_timer(self._loop.time()))
        self._arm()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
