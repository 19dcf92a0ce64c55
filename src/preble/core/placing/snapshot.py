"""A scheduler's state as one value: for metrics, pages, logs and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

from preble.core.cluster.replicas import ReplicaTable
from preble.core.cluster.state import ClusterState
from preble.core.costs.refit import CostFactors, CostRefit
from preble.core.placing.cache_tracker import CacheTracker
from preble.core.placing.in_flight import InFlightTable
from preble.core.prefixes.cache_entry import NAME_BYTES
from preble.core.prefixes.hottest import hottest
from preble.core.replica_index import ReplicaIndex, replicas_in
from preble.core.types import TOKEN_BYTES, CacheDrift, ReplicaId, RequestId

_INDEX_BYTES_PER_TOKEN = 5.5
"""Of the prefix index, beside the name of each block: up to that much was measured (docs/performance.md)."""
_NAMED_BYTES = 64 * TOKEN_BYTES
"""How much of a prefix's run its name is a hash of."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica as the scheduler sees it.

    `num_requests`: in flight. `waiting_prefill_tokens`, `waiting_prefill_s`: prompt tokens to compute of those without
    a first token, and the seconds that takes. `load_s`: L, seconds of work placed in the window. `cached_tokens`: KV
    tokens cached or about to be cached. `in_use_tokens`: those of requests in flight. `kv_capacity_tokens`: None where
    unknown. `trusted`: whether matches there count. `model`: the base model that it serves, "" for any.
    """

    num_requests: int
    waiting_prefill_tokens: int
    waiting_prefill_s: float
    load_s: float
    cached_tokens: int
    in_use_tokens: int
    kv_capacity_tokens: int | None
    drift: CacheDrift
    trusted: bool = True
    model: str = ""


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A run of tokens that prompts of the window share, as one node of a tree.

    `name`: a hash of the run's first tokens and of its parent's name, so that the tokens stay secret.
    `parent`: the place in the list of the node above, None at the top. `start`, `end`: of the run, in tokens from the
    start of the prompt. `uses`: requests of the window that use it. `holders`: the replicas that hold all of it in
    their engine's memory; `partly`: those that hold a part. `request_id`: the last one that uses it, of those that the
    caller named; "" if none does.
    """

    name: str
    parent: int | None
    start: int
    end: int
    uses: int
    holders: tuple[ReplicaId, ...]
    partly: tuple[ReplicaId, ...]
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """A scheduler at one moment. It does not change afterwards.

    `num_index_tokens`, `num_index_bytes`: tokens in the prefix trees, and the memory of the whole index, by count.
    `num_in_flight`: our own requests; `num_assumed`: those of other gateways.
    `index_budget_bytes`: its memory budget, None for no limit. `enough_index_bytes`: about what it takes where the KV
    caches of known size are all full and share nothing. `num_unindexed`: prompts and reports so far that the
    budget had no room for.
    `num_replicated_prefixes`: prefixes that the policy (`e2`) serves from replicas of its choice. `cost_factors`: by
    what live requests have corrected the cost profile; ones where it is not corrected. `window_s`: of the load
    window. `replicas`: in the order of their indexes.
    """

    num_in_flight: int
    num_index_tokens: int
    num_index_bytes: int
    index_budget_bytes: int | None
    enough_index_bytes: int
    num_unindexed: int
    num_replicated_prefixes: int
    cost_factors: CostFactors
    window_s: float
    replicas: Mapping[ReplicaId, ReplicaState]
    num_assumed: int = 0


def take_snapshot(
    cluster: ClusterState,
    tracker: CacheTracker,
    in_flight: InFlightTable,
    refit: CostRefit | None,
    *,
    index_budget_bytes: int | None,
    num_replicated: int,
) -> SchedulerState:
    """Return the state of the scheduler that these are parts of. O(replicas)."""
    return SchedulerState(
        num_in_flight=len(in_flight) - in_flight.num_assumed,
        num_assumed=in_flight.num_assumed,
        num_index_tokens=cluster.index.tree.num_tokens,
        num_index_bytes=cluster.index.num_bytes,
        index_budget_bytes=index_budget_bytes,
        enough_index_bytes=_enough_index_bytes(cluster.replicas),
        num_unindexed=tracker.num_unindexed,
        num_replicated_prefixes=num_replicated,
        cost_factors=refit.factors if refit is not None else CostFactors(),
        window_s=cluster.window.window_s,
        replicas={
            cluster.replicas.replica_id(replica): _replica_state(cluster, tracker, replica)
            for replica in cluster.replicas.live_replicas
        },
    )


def _replica_state(cluster: ClusterState, tracker: CacheTracker, replica: ReplicaIndex) -> ReplicaState:
    return ReplicaState(
        num_requests=cluster.replicas.num_requests[replica],
        waiting_prefill_tokens=cluster.replicas.waiting_prefill_tokens[replica],
        waiting_prefill_s=cluster.replicas.waiting_prefill_s[replica],
        load_s=cluster.window.load_s[replica],
        cached_tokens=cluster.index.caches[replica].used_tokens,
        in_use_tokens=cluster.index.caches[replica].in_use_tokens,
        kv_capacity_tokens=cluster.replicas.specs[replica].kv_capacity_tokens,
        drift=replace(tracker.drift(replica)),
        trusted=cluster.replicas.trusts(replica),
        model=cluster.replicas.specs[replica].model,
    )


def _enough_index_bytes(replicas: ReplicaTable) -> int:
    """Return what the index takes about, where the KV capacity of the replicas is known."""
    bytes_of = [
        (spec.kv_capacity_tokens or 0) * (_INDEX_BYTES_PER_TOKEN + NAME_BYTES / spec.block_size)
        for spec in replicas.specs.values()
    ]
    return int(sum(bytes_of))


def hot_prefixes(cluster: ClusterState, at_most: int, placed: Mapping[float, RequestId]) -> list[HotPrefix]:
    """Return the hot prefixes as `GlobalScheduler.hottest` does."""
    found: list[HotPrefix] = []
    last_users = cluster.window.last_users(placed)
    for shared in hottest(cluster.index.tree, at_most):
        node = shared.node
        above = found[shared.parent].name if shared.parent is not None else shared.namespace
        name = blake2b(above.encode() + node.tokens[:_NAMED_BYTES], digest_size=6).hexdigest()
        whole, ids = node.full_holders, cluster.replicas.ids
        holders = tuple(r for i in replicas_in(whole) if (r := ids[i]) is not None)
        partly = tuple(r for i in replicas_in(node.holders & ~whole) if (r := ids[i]) is not None)
        user = last_users.get(node, RequestId(""))
        found.append(HotPrefix(name, shared.parent, node.start, node.end, node.recent_uses, holders, partly, user))
    return found
