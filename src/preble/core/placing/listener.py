"""Who wants to know everything that changes a scheduler: a decision log, for example."""

from __future__ import annotations

from typing import Protocol

from preble.core.types import (
    BlocksStored,
    CacheChange,
    PeerEvent,
    PeerId,
    Placement,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
)
from preble.errors import NoReplicaError, PromptTooLong


class SchedulerListener(Protocol):
    """One method for each call that changes a `GlobalScheduler`, called when that call is done, in order.

    A call that raises because of the caller's mistake changes nothing and is not reported. The same calls on a fresh
    scheduler of the same settings make the same placements, so what a listener notes can be replayed.
    """

    def placed(self, request: Request, placement: Placement, now: float) -> None: ...

    def not_placed(self, request: Request, error: NoReplicaError | PromptTooLong, now: float) -> None:
        """No replica could take the request. `place` raises `error` afterwards."""
        ...

    def moved(self, request_id: RequestId, to: ReplicaId, now: float) -> None: ...

    def first_token(self, request_id: RequestId, now: float) -> None: ...

    def finished(self, request_id: RequestId, output_tokens: int, cached_tokens: int | None, now: float) -> None: ...

    def assumed(self, event: PeerEvent, now: float) -> None:
        """Also for an event that changed nothing yet: an end may come before its placement."""
        ...

    def peer_forgotten(self, peer: PeerId, now: float) -> None: ...

    def stored(self, event: BlocksStored, located: bool, now: float) -> None:
        """`located`: what `GlobalScheduler.on_stored` returned."""
        ...

    def evicted(self, event: CacheChange, now: float) -> None: ...

    def replica_added(self, spec: ReplicaSpec, now: float) -> None: ...

    def replica_removed(self, replica_id: ReplicaId, now: float) -> None: ...

    def trust_changed(self, replica_id: ReplicaId, trusted: bool, now: float) -> None: ...

    def timer_ran(self, now: float) -> None: ...
