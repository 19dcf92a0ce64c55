"""The only asynchronous code that touches the scheduler: placements, ends, cache events, replicas and timers.

Everything here is synchronous and runs in the event loop's thread, so nothing can come between reading the scheduler's
state and acting on it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import (
    BlocksStored,
    KvEvent,
    Placement,
    ReplicaId,
    Request,
    RequestId,
    namespace_of,
)
from preble.decisions.recent import DecisionRecord, RecentDecisions
from preble.engines.adapter import Engine, EngineInfo, EngineLoad, EngineResponse
from preble.errors import NoReplicaError, UnknownModel
from preble.serving.cancel_scope import CancelScope
from preble.serving.parity.report import ParityReport
from preble.serving.replicas.resync_backoff import ResyncBackoff
from preble.serving.telemetry.metrics import Telemetry


@dataclass(slots=True)
class LiveReplica:
    """A replica in the rotation. `suspect` is set when something is wrong with it, so that it is checked at once.

    `trusted`: whether matches there count. `parity`: the last report on its token ids and cache, None before any.
    `engine_load`: its load by its own account, which counts other clients' requests too; None where it is not known.
    """

    engine: Engine
    info: EngineInfo
    engine_load: EngineLoad | None = None
    trusted: bool = True
    parity: ParityReport | None = None
    suspect: asyncio.Event = field(default_factory=asyncio.Event)
    resync_backoff: ResyncBackoff = field(default_factory=ResyncBackoff)


@dataclass(slots=True)
class Attempt:
    """One placement that is being carried out.

    `cancel_scope`: enter it around the work. `response`: set by the carrier of the request. `orphaned`: its replica
    was removed, and the scheduler has ended it.
    """

    request: Request
    placement: Placement
    engine: Engine
    placed_at: float
    record: DecisionRecord
    cancel_scope: CancelScope
    response: EngineResponse | None = None
    orphaned: bool = False

    def was_heard_since(self, time_s: float) -> bool:
        """Whether a piece of the answer has come since then."""
        heard_at = self.response.heard_at if self.response is not None else None
        return heard_at is not None and heard_at >= time_s


class Dispatcher:
    """Owns the scheduler and the table of live replicas. Use within one running event loop."""

    def __init__(self, scheduler: GlobalScheduler, telemetry: Telemetry, recent: RecentDecisions) -> None:
        self._scheduler = scheduler
        self._telemetry = telemetry
        self._loop = asyncio.get_running_loop()
        self.recent = recent
        self._live: dict[ReplicaId, LiveReplica] = {}
        self._calls: dict[RequestId, Attempt] = {}
        self._others: dict[str, frozenset[ReplicaId]] = {}
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0

    @property
    def scheduler(self) -> GlobalScheduler:
        """To be read only."""
        return self._scheduler

    @property
    def live(self) -> Mapping[ReplicaId, LiveReplica]:
        """The replicas in the rotation."""
        return MappingProxyType(self._live)

    @property
    def num_in_flight(self) -> int:
        """Placements that have not ended."""
        return len(self._calls)

    # requests

    def place(self, request: Request, model: str | None = None) -> Attempt:
        """Place a request among the replicas that serve `model`; every call must be ended by `finish`.

        Raises: NoReplicaError, PromptTooLong, UnknownModel.
        """
        if others := self._not_serving(model):
            request = dataclasses.replace(request, avoid=request.avoid | others)
        now, started = self._loop.time(), time.perf_counter()
        placement = self._scheduler.place(request, now)
        took_s = time.perf_counter() - started
        engine = self._live[placement.replica_id].engine
        record = self.recent.placed(placement, now)
        call = Attempt(request, placement, engine, now, record, CancelScope(placement.replica_id))
        self._calls[request.request_id] = call
        self._arm()
        self._telemetry.placed(placement, took_s)
        return call

    def first_token(self, call: Attempt) -> None:
        """The first piece of a streamed answer has arrived."""
        now = self._loop.time()
        call.record.first_token_at = now
        self._telemetry.first_byte(call.placement.replica_id, now - call.placed_at)
        if not call.orphaned:
            self._scheduler.on_first_token(call.request.request_id, now)

    def finish(self, call: Attempt, outcome: str, output_tokens: int = 0, cached_tokens: int | None = None) -> None:
        """The call has ended, whatever way. To be called exactly once a call."""
        now = self._loop.time()
        if not call.orphaned:
            del self._calls[call.request.request_id]
            self._scheduler.on_finish(call.request.request_id, output_tokens, now, cached_tokens=cached_tokens)
            self._arm()
        call.record.finished(now, outcome, output_tokens, cached_tokens)
        self._telemetry.finished(
            call.placement,
            outcome=outcome,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
            e2e_s=now - call.placed_at,
        )

    # models

    def models(self) -> dict[str, LiveReplica]:
        """Every model served now, with a replica that serves it."""
        return {name: replica for replica in self._live.values() for name in replica.info.models}

    def check_model(self, model: str | None) -> None:
        """Raises: NoReplicaError: no replica is up. UnknownModel: none of those that are serves `model`."""
        if not self._live:
            raise NoReplicaError("no replica is up")
        self._not_serving(model)

    def engines_for(self, model: str | None) -> list[Engine]:
        """The live replicas that serve `model`. Raises: UnknownModel."""
        others = self._not_serving(model)
        return [replica.engine for replica_id, replica in self._live.items() if replica_id not in others]

    def namespace(self, model: str | None, cache_salt: str | None) -> str:
        """The namespace in which prompts for this model and salt share KV."""
        is_adapter = any(model in replica.info.adapters for replica in self._live.values())
        return namespace_of(model if is_adapter else None, cache_salt)

    def _not_serving(self, model: str | None) -> frozenset[ReplicaId]:
        """The live replicas that do not serve `model`; None is served by all. Raises: UnknownModel."""
        if model is None:
            return frozenset()
        if (others := self._others.get(model)) is not None:
            return others
        others = frozenset(r for r, replica in self._live.items() if model not in replica.info.models)
        if self._live and len(others) == len(self._live):
            raise UnknownModel(
                f"no replica serves the model {model[:200]!r}; there are: {', '.join(sorted(self.models()))}",
                param="model",
            )
        self._others[model] = others
        return others

    # replicas

    def add_replica(self, engine: Engine, info: EngineInfo) -> LiveReplica:
        """Take a replica into the rotation."""
        replica_id = engine.replica_id
        self._scheduler.add_replica(info.spec, self._loop.time())
        self._live[replica_id] = replica = LiveReplica(engine, info)
        self._others.clear()
        self._arm()
        self._telemetry.replica_up(
            replica_id, engine=info.engine, version=info.version, models=info.models, events=info.spec.reports_events
        )
        return replica

    def remove_replica(self, replica_id: ReplicaId, reason: str | None, *, silent_since: float | None = None) -> None:
        """Take it out. Requests that run there are the scheduler's no more; they may end well or be placed again.

        `silent_since`: when its machine fell silent; requests that have heard nothing since are withdrawn from it. None
        where it still answers or refuses: then a connection that is of no use any more tells so itself.
        """
        orphans = self._scheduler.remove_replica(replica_id, self._loop.time())
        for request in orphans:
            call = self._calls.pop(request.request_id)
            call.orphaned = call.record.replica_lost = True
            if silent_since is not None and not call.was_heard_since(silent_since):
                call.cancel_scope.withdraw(f"was taken out of the rotation: {reason}")
        del self._live[replica_id]
        self._others.clear()
        self._arm()
        self._telemetry.replica_down(replica_id, reason, len(orphans))

    def suspect(self, replica_id: ReplicaId) -> None:
        """A connection to the replica failed, or it does not know its model: have it checked at once."""
        if (replica := self._live.get(replica_id)) is not None:
            replica.suspect.set()

    def set_trust(self, replica: LiveReplica, trusted: bool) -> None:
        """Have matches on a replica count or not. Nothing happens if it has left the rotation."""
        replica_id = replica.engine.replica_id
        if self._live.get(replica_id) is replica and replica.trusted != trusted:
            self._scheduler.set_trust(replica_id, trusted, self._loop.time())
            replica.trusted = trusted

    def apply(self, event: KvEvent) -> None:
        """Correct the scheduler's belief of what a live replica caches."""
        self._telemetry.kv_events.labels(event.replica_id, type(event).__name__).inc()
        if isinstance(event, BlocksStored):
            if not self._scheduler.on_stored(event, self._loop.time()):
                self._note_unlocated(event)
        else:
            self._scheduler.on_evicted(event, self._loop.time())
        self._arm()

    def _note_unlocated(self, event: BlocksStored) -> None:
        """Count the event. Where the stream knows its parent, have it start over, though not all the time."""
        replica_id = event.replica_id
        self._telemetry.unlocated.labels(replica_id).inc()
        if event.is_orphan:
            return
        replica = self._live[replica_id]
        if replica.resync_backoff.is_due(self._loop.time()):
            self._telemetry.resynced(replica_id)
            replica.engine.resync_kv_events()

    # timers

    def _arm(self) -> None:
        """Have `on_timer` called when the scheduler wants it, not later."""
        when = self._scheduler.next_timer()
        if self._timer is not None:
            if when is not None and when >= self._timer_at:
                return
            self._timer.cancel()
        # Kept beside the handle: for a time that is past, uvloop gives one that does not know its time.
        self._timer_at = when or 0.0
        self._timer = None if when is None else self._loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._telemetry.homes_changed(self._scheduler.on_timer(self._loop.time()))
        self._arm()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
