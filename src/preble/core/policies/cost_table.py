"""The load cost of several replicas for one request, and the cheapest of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from random import Random
from typing import overload

from preble.core.policies.view import ClusterView
from preble.core.replica_index import ReplicaIndex
from preble.core.types import Candidate


class CostTable(Sequence[Candidate]):
    """The load cost of several replicas for one request. It reads as candidates, which are made on demand.

    Lists are by position in `replicas`. `matched`: what `ClusterView.matched_tokens` gives for them. `load_s`,
    `prefill_s`: L and P. M is that of Algorithm 2.
    """

    __slots__ = ("_eviction_s", "_ids", "_load_s", "_loaded", "_matched", "_prefill_s", "_replicas")

    def __init__(
        self,
        view: ClusterView,
        replicas: list[ReplicaIndex],
        matched: list[int],
        *,
        load_s: list[float],
        prefill_s: list[float],
    ) -> None:
        self._replicas = replicas
        self._ids = view.replica_ids
        self._matched = matched
        self._load_s = load_s
        self._eviction_s = _eviction_s(view, replicas, matched)
        self._prefill_s = prefill_s
        self._loaded = [view.loaded_tokens(replica) for replica in replicas] if view.has_tiers else None

    def cheapest(self, rng: Random) -> ReplicaIndex:
        """Return the replica with the lowest cost, ties at random."""
        load_s, eviction_s, prefill_s = self._load_s, self._eviction_s, self._prefill_s
        lowest_s = inf
        best: list[ReplicaIndex] = []
        for i, replica in enumerate(self._replicas):
            cost_s = load_s[i] + eviction_s[i] + prefill_s[i]
            if cost_s < lowest_s:
                lowest_s, best = cost_s, [replica]
            elif cost_s == lowest_s:
                best.append(replica)
        return _any_of(best, rng)

    def __len__(self) -> int:
        return len(self._replicas)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        replica_id = self._ids[self._replicas[index]]
        assert replica_id is not None
        return Candidate(
            replica_id,
            self._matched[index],
            self._load_s[index],
            self._eviction_s[index],
            self._prefill_s[index],
            loaded_tokens=0 if self._loaded is None else self._loaded[index],
        )


def load_costs(view: ClusterView, replicas: list[ReplicaIndex]) -> CostTable:
    """Return the load cost L + M + P of these replicas: Algorithm 2. O(replicas + depth + victims)."""
    matched, load_s = view.matched_tokens(replicas), view.load_s
    prefill_s = [
        (view.prefill_s(matched[i]) + view.loading_s(replica)) * view.slowness(replica)
        for i, replica in enumerate(replicas)
    ]
    return CostTable(view, replicas, matched, load_s=[load_s[replica] for replica in replicas], prefill_s=prefill_s)


def _eviction_s(view: ClusterView, replicas: list[ReplicaIndex], matched: list[int]) -> list[float]:
    """Return M: seconds of recomputation to expect from what must be evicted to run the request on each replica."""
    cluster, num_tokens, outputs = view.cluster, view.request.num_prompt_tokens, view.mean_output_tokens
    capacity, caches = cluster.replicas.capacity, cluster.index.caches
    costs_s = [0.0] * len(replicas)
    for i, replica in enumerate(replicas):
        missed = num_tokens - matched[i] + view.loaded_tokens(replica)
        room = capacity[replica] - caches[replica].used_tokens - missed
        if outputs[replica] + 1.0 < room:
            continue
        excess = round(outputs[replica]) - room
        if excess > 0:
            evictions = cluster.eviction_costs[replica]
            costs_s[i] = evictions.cost_s(int(excess), view.num_window_requests[replica], view.match.path)
    return costs_s


def lowest(replicas: Iterable[ReplicaIndex], costs: Iterable[float], rng: Random) -> ReplicaIndex:
    """Return the replica with the lowest cost. Ties are broken at random: else the first of equal replicas would get it
    all.

    >>> lowest([ReplicaIndex(0), ReplicaIndex(3)], [2.0, 1.0], Random(0))
    3
    """
    known = list(costs)
    lowest_cost = min(known)
    best = [replica for replica, cost in zip(replicas, known, strict=True) if cost == lowest_cost]
    return _any_of(best, rng)


def _any_of(replicas: list[ReplicaIndex], rng: Random) -> ReplicaIndex:
    return replicas[0] if len(replicas) == 1 else rng.choice(replicas)
