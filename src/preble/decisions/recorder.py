"""A scheduler that logs everything that goes through its door."""

from __future__ import annotations

from preble.core.costs.refit import CostFactors
from preble.core.placing.door import Scheduler
from preble.core.policies.policy import Policy
from preble.core.types import (
    BlocksEvicted,
    BlocksStored,
    CacheCleared,
    Placement,
    PrefixHomeChange,
    ReplicaId,
    ReplicaSpec,
    ReplicaState,
    Request,
    RequestId,
)
from preble.decisions import lines
from preble.decisions.writer import LogWriter
from preble.errors import NoReplicaError, PromptTooLong


class RecordingScheduler:
    """The same door as `scheduler`'s, which decides; each call that changes anything goes into the log, in order.

    A call that raises because of the caller's mistake has changed nothing and is not logged; a request that could not
    be placed is. Everything must go through this door from the beginning, or the log does not replay.
    """

    def __init__(self, scheduler: Scheduler, log: LogWriter) -> None:
        self._scheduler = scheduler
        self._log = log

    def place(self, request: Request, now: float) -> Placement:
        """See `GlobalScheduler.place`."""
        size = len(request.prompt)
        try:
            placement = self._scheduler.place(request, now)
        except (NoReplicaError, PromptTooLong) as error:
            self._log.write(lines.place_line, now, request, None, type(error).__name__, size=size)
            raise
        self._log.write(lines.place_line, now, request, placement, None, size=size)
        return placement

    def move(self, request_id: RequestId, to: ReplicaId, now: float) -> None:
        """See `GlobalScheduler.move`."""
        self._scheduler.move(request_id, to, now)
        self._log.write(lines.move_line, now, request_id, to)

    def on_first_token(self, request_id: RequestId, now: float) -> None:
        """See `GlobalScheduler.on_first_token`."""
        self._scheduler.on_first_token(request_id, now)
        self._log.write(lines.first_token_line, now, request_id)

    def on_finish(
        self, request_id: RequestId, output_tokens: int, now: float, *, cached_tokens: int | None = None
    ) -> None:
        """See `GlobalScheduler.on_finish`."""
        self._scheduler.on_finish(request_id, output_tokens, now, cached_tokens=cached_tokens)
        self._log.write(lines.finish_line, now, request_id, output_tokens, cached_tokens)

    def on_stored(self, event: BlocksStored, now: float) -> bool:
        """See `GlobalScheduler.on_stored`."""
        located = self._scheduler.on_stored(event, now)
        self._log.write(lines.stored_line, now, event, located, size=len(event.tokens))
        return located

    def on_evicted(self, event: BlocksEvicted | CacheCleared, now: float) -> None:
        """See `GlobalScheduler.on_evicted`."""
        self._scheduler.on_evicted(event, now)
        self._log.write(lines.evicted_line, now, event)

    def add_replica(self, spec: ReplicaSpec, now: float) -> None:
        """See `GlobalScheduler.add_replica`."""
        self._scheduler.add_replica(spec, now)
        self._log.write(lines.add_replica_line, now, spec)

    def remove_replica(self, replica_id: ReplicaId, now: float) -> list[Request]:
        """See `GlobalScheduler.remove_replica`."""
        orphans = self._scheduler.remove_replica(replica_id, now)
        self._log.write(lines.remove_replica_line, now, replica_id)
        return orphans

    def set_trust(self, replica_id: ReplicaId, trusted: bool, now: float) -> None:
        """See `GlobalScheduler.set_trust`."""
        self._scheduler.set_trust(replica_id, trusted, now)
        self._log.write(lines.trust_line, now, replica_id, trusted)

    def on_timer(self, now: float) -> list[PrefixHomeChange]:
        """See `GlobalScheduler.on_timer`."""
        changes = self._scheduler.on_timer(now)
        self._log.write(lines.timer_line, now)
        return changes

    # -- reading: nothing to log --------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        return self._scheduler.policy

    def next_timer(self) -> float | None:
        return self._scheduler.next_timer()

    def replica_ids(self) -> list[ReplicaId]:
        return self._scheduler.replica_ids()

    def replica_state(self, replica_id: ReplicaId) -> ReplicaState:
        return self._scheduler.replica_state(replica_id)

    def matched_tokens(self, replica_id: ReplicaId, request: Request) -> int:
        return self._scheduler.matched_tokens(replica_id, request)

    @property
    def num_in_flight(self) -> int:
        return self._scheduler.num_in_flight

    @property
    def num_index_tokens(self) -> int:
        return self._scheduler.num_index_tokens

    @property
    def num_index_bytes(self) -> int:
        return self._scheduler.num_index_bytes

    @property
    def num_unindexed(self) -> int:
        return self._scheduler.num_unindexed

    @property
    def num_replicated_prefixes(self) -> int:
        return self._scheduler.num_replicated_prefixes

    @property
    def cost_factors(self) -> CostFactors:
        return self._scheduler.cost_factors

    def check(self) -> None:
        self._scheduler.check()
