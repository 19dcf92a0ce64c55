"""A scheduler's state as one value: for metrics, pages, logs and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from preble.core.costs.refit import CostFactors
from preble.core.types import CacheDrift, ReplicaId


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica as the scheduler sees it.

    `num_requests`: in flight. `waiting_prefill_tokens`, `waiting_prefill_s`: prompt tokens to compute of those without
    a first token, and the seconds that takes. `load_s`: L, seconds of work placed in the window. `cached_tokens`: KV
    tokens cached or about to be cached. `in_use_tokens`: those of requests in flight. `kv_capacity_tokens`: None where
    unknown. `trusted`: whether matches there count.
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


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A run of tokens that prompts of the window share, as one node of a tree.

    `name`: a hash of the run's first tokens and of its parent's name, so that the tokens stay secret.
    `parent`: the place in the list of the node above, None at the top. `start`, `end`: of the run, in tokens from the
    start of the prompt. `uses`: requests of the window that use it. `holders`: the replicas that hold all of it in
    their engine's memory; `partly`: those that hold a part.
    """

    name: str
    parent: int | None
    start: int
    end: int
    uses: int
    holders: tuple[ReplicaId, ...]
    partly: tuple[ReplicaId, ...]


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """A scheduler at one moment. It does not change afterwards.

    `num_index_tokens`, `num_index_bytes`: tokens in the prefix trees, and the memory of the whole index, by count.
    `num_in_flight`: our own requests; `num_assumed`: those that other gateways told us of.
    `index_budget_bytes`: its memory budget, None for no limit. `enough_index_bytes`: about what it takes where the KV
    caches of known size are all full and share nothing. `num_unindexed`: prompts and reports so far that the
    budget had no room for.
    `num_replicated_prefixes`: prefixes that rebalancing serves from replicas of its choice. `cost_factors`: by what
    live requests have corrected the cost profile; ones where it is not corrected. `window_s`: of the load
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
