"""Whether the fleet has room for one more request: its replicas' own queues are kept short.

What waits inside a replica goes in the order in which it came there; whose turn it is can be decided only before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from preble.core.types import ReplicaId, RequestId

Where = Collection[ReplicaId] | None
"""The replicas that can serve a request; None for any."""

_LATE = 4.0
"""How many times the depth a request may wait beyond its own prefill before its replica counts as full."""


@dataclass(slots=True)
class _Pending:
    tenant: str
    prefill_s: float
    late_at: float
    begun_at: float | None
    """When its answer counts as begun; None if that will be reported."""


class _Prefilling:
    __slots__ = ("pending", "pending_s")

    def __init__(self) -> None:
        self.pending: dict[RequestId, _Pending] = {}
        self.pending_s = 0.0

    def drop(self, request_id: RequestId) -> None:
        pending = self.pending.pop(request_id, None)
        if pending is not None:
            self.pending_s = max(self.pending_s - pending.prefill_s, 0.0) if self.pending else 0.0

    def drop_assumed(self, now: float) -> None:
        """Drop requests that report nothing and whose estimated prefill is over, in any order."""
        due = [
            request_id
            for request_id, pending in self.pending.items()
            if pending.begun_at is not None and pending.begun_at <= now
        ]
        for request_id in due:
            self.drop(request_id)


class Gate:
    """`depth_s`: seconds of prefill that may wait inside each replica, which keep it busy until more comes.

    While several tenants ask, no prefill may wait there for another: whose is next would be decided too early.
    """

    def __init__(self, depth_s: float) -> None:
        self.depth_s = depth_s
        self._replicas: dict[ReplicaId, _Prefilling] = {}

    @property
    def num_replicas(self) -> int:
        """How many there are."""
        return len(self._replicas)

    def add_replica(self, replica_id: ReplicaId) -> None:
        """A replica joins, with nothing to do."""
        self._replicas[replica_id] = _Prefilling()

    def remove_replica(self, replica_id: ReplicaId) -> None:
        """Forget a replica that has left. Later reports about its requests are ignored."""
        self._replicas.pop(replica_id, None)

    def sent(
        self,
        replica_id: ReplicaId,
        request_id: RequestId,
        tenant: str,
        prefill_s: float,
        now: float,
        *,
        streams: bool,
    ) -> None:
        """A request goes to a replica. `streams`: `prefilled` will be called; else it counts as begun in its turn."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.pending_s += prefill_s
            begun_at = None if streams else now + replica.pending_s
            late_at = now + replica.pending_s + _LATE * self.depth_s
            replica.pending[request_id] = _Pending(tenant, prefill_s, late_at, begun_at)

    def prefilled(self, replica_id: ReplicaId, request_id: RequestId) -> None:
        """Its prefill is over, or it has ended; further calls change nothing."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.drop(request_id)

    @property
    def pending_s(self) -> float:
        """Prefill that waits or runs inside the replicas. O(replicas)."""
        return sum(replica.pending_s for replica in self._replicas.values())

    def has_room(self, where: Where, now: float, *, is_shared: bool = False) -> bool:
        """Return whether any of these should get more. `is_shared`: whether several tenants ask. O(replicas)."""
        depth_s = 0.0 if is_shared else self.depth_s
        return any(self._is_open(replica, now, depth_s) for replica in self._among(where))

    def has_room_of_its_own(self, where: Where, tenant: str) -> bool:
        """Return whether next to nothing of this tenant waits at any of these. O(what waits inside replicas)."""
        return any(
            sum(pending.prefill_s for pending in replica.pending.values() if pending.tenant == tenant) < self.depth_s
            for replica in self._among(where)
        )

    def next_assumption(self, now: float) -> float | None:
        """Return when the next request without a report counts as begun, always after `now`; None if there is none."""
        for replica in self._replicas.values():
            replica.drop_assumed(now)
        times = [
            pending.begun_at
            for replica in self._replicas.values()
            for pending in replica.pending.values()
            if pending.begun_at is not None
        ]
        return min(times, default=None)

    def _among(self, where: Where) -> Iterable[_Prefilling]:
        if where is None:
            return self._replicas.values()
        return [self._replicas[r] for r in where if r in self._replicas]

    @staticmethod
    def _is_open(replica: _Prefilling, now: float, depth_s: float) -> bool:
        replica.drop_assumed(now)
        if not replica.pending:
            return True
        return replica.pending_s < depth_s and now < next(iter(replica.pending.values())).late_at
