"""The simulated links over which replicas copy KV: one copy at a time into a replica, and one out of it."""

from __future__ import annotations

from math import inf

from preble.core.costs.model import CostModel
from preble.core.types import Request, Transfer
from preble.lab.sim.replica import SimReplica


class CopyLinks:
    """When copies begin and how long they take; `cost_model` has the links' rate and latency."""

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model
        self._sending_until: dict[SimReplica, float] = {}
        self._receiving_until: dict[SimReplica, float] = {}

    def seconds(self, transfer: Transfer) -> float:
        """Return how long a copy takes once it has begun."""
        return self._cost_model.link_s(transfer.tokens) + self._cost_model.link_latency_s

    def reserve(self, source: SimReplica, target: SimReplica, transfer: Transfer, now: float) -> float:
        """Return when the copy begins, `now` or later. Both links are busy with it until its end."""
        free = self._sending_until.get(source, -inf), self._receiving_until.get(target, -inf)
        start = max(now, *free)
        until = start + self._cost_model.link_s(transfer.tokens)
        self._sending_until[source] = self._receiving_until[target] = until
        return start


class Copy:
    """One copy that has begun: its source keeps what it sends."""

    def __init__(self, request: Request, source: SimReplica, target: SimReplica) -> None:
        self._request, self._source, self._target = request, source, target
        self._lent = source.lend(request)

    def end(self) -> bool:
        """Put what was sent into the target's cache. Return False if there was nothing, or the source was lost.

        Another request may have had it computed there meanwhile.
        """
        self._source.take_back(self._lent)
        if not self._source.is_alive:
            return False
        return self._target.load(self._request, self._lent.hashes) or self._target.caches(self._lent.hashes)
