"""The scheduler's door as those see it who go through it: the gateway, the simulator.

`GlobalScheduler` is one; whatever stands in front of it, such as a recorder, is another. Contracts: `GlobalScheduler`.
"""

from __future__ import annotations

from typing import Protocol

from preble.core.costs.refit import CostFactors
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


class Scheduler(Protocol):
    """Everything that may be asked or told of a scheduler."""

    @property
    def policy(self) -> Policy: ...

    def place(self, request: Request, now: float) -> Placement: ...

    def move(self, request_id: RequestId, to: ReplicaId, now: float) -> None: ...

    def on_first_token(self, request_id: RequestId, now: float) -> None: ...

    def on_finish(
        self, request_id: RequestId, output_tokens: int, now: float, *, cached_tokens: int | None = None
    ) -> None: ...

    def on_stored(self, event: BlocksStored, now: float) -> bool: ...

    def on_evicted(self, event: BlocksEvicted | CacheCleared, now: float) -> None: ...

    def add_replica(self, spec: ReplicaSpec, now: float) -> None: ...

    def remove_replica(self, replica_id: ReplicaId, now: float) -> list[Request]: ...

    def set_trust(self, replica_id: ReplicaId, trusted: bool, now: float) -> None: ...

    def next_timer(self) -> float | None: ...

    def on_timer(self, now: float) -> list[PrefixHomeChange]: ...

    def replica_ids(self) -> list[ReplicaId]: ...

    def replica_state(self, replica_id: ReplicaId) -> ReplicaState: ...

    def matched_tokens(self, replica_id: ReplicaId, request: Request) -> int: ...

    @property
    def num_in_flight(self) -> int: ...

    @property
    def num_index_tokens(self) -> int: ...

    @property
    def num_index_bytes(self) -> int: ...

    @property
    def num_unindexed(self) -> int: ...

    @property
    def num_replicated_prefixes(self) -> int: ...

    @property
    def cost_factors(self) -> CostFactors: ...

    def check(self) -> None: ...
