"""What a placement policy is, and what it may see.

A policy chooses from a read-only `ClusterView`; all bookkeeping stays in `GlobalScheduler`, so that every policy is
compared on equal terms. What a view computes, it computes when first asked, once a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

from preble.core.cost_model import CostModel
from preble.core.eviction_cost import EvictionCost
from preble.core.fleet import Fleet
from preble.core.load_window import LoadWindow
from preble.core.prefix_index import Coverage, PrefixIndex, slots_of
from preble.core.radix_tree import Match, Node
from preble.core.rebalance import Rebalancer
from preble.core.types import Candidate, Reason, ReplicaId, Request


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy's decision.

    `candidates`: what it weighed, for logs and explanations. `prefix`: where the prefix ends for whose sake the replica
    was chosen; its queueing is watched, and it may be replicated. None where there is no such prefix.
    """

    slot: int
    reason: Reason
    candidates: Sequence[Candidate] = ()
    prefix: Node | None = None


class Policy(Protocol):
    """One rule of placement. May keep state of its own; must not change the view."""

    @property
    def name(self) -> str: ...

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """The replica for `view.request`, one of `view.slots`."""
        ...


class ClusterView:
    """The cluster as one request sees it.

    `slots`: the replicas that may get it, ascending. Arrays are indexed by slot and must not be written to; what they
    hold for other slots means nothing.
    """

    def __init__(
        self,
        request: Request,
        eligible: int,
        match: Match,
        *,
        fleet: Fleet,
        index: PrefixIndex,
        window: LoadWindow,
        cost_model: CostModel,
        eviction_costs: dict[int, EvictionCost],
        rebalancer: Rebalancer,
    ) -> None:
        self.request = request
        self.cost_model = cost_model
        self._eligible = eligible
        self._match = match
        self._fleet = fleet
        self._index = index
        self._window = window
        self._eviction_costs = eviction_costs
        self._rebalancer = rebalancer

    @cached_property
    def slots(self) -> Sequence[int]:
        return self._fleet.live_slots if self._eligible == self._fleet.live else list(slots_of(self._eligible))

    def replica_id(self, slot: int) -> ReplicaId:
        return self._fleet.replica_id(slot)

    @property
    def num_requests(self) -> NDArray[np.int64]:
        """Requests in flight."""
        return self._fleet.num_requests

    @property
    def waiting_prefill_tokens(self) -> NDArray[np.int64]:
        """Prompt tokens still to be computed, of requests in flight without a first token."""
        return self._fleet.waiting_prefill_tokens

    @property
    def waiting_prefill_s(self) -> NDArray[np.float64]:
        """Seconds of prefill that these tokens take."""
        return self._fleet.waiting_prefill_s

    @property
    def num_decoding(self) -> NDArray[np.int64]:
        """Requests in flight with a first token."""
        return self._fleet.num_decoding

    @property
    def load_s(self) -> NDArray[np.float64]:
        """L: seconds of work placed in the window."""
        return self._window.load_s

    def mean_output_tokens(self, slot: int) -> float:
        return self._window.mean_output_tokens(slot)

    @cached_property
    def _coverage(self) -> Coverage:
        return self._index.coverage(self._match, self._eligible)

    @property
    def cached_tokens(self) -> int:
        """The longest prefix of the prompt that any one of the replicas holds."""
        return self._coverage.cached_tokens

    @property
    def key_holders(self) -> list[int]:
        """The replicas that hold the key portion: most of the node with the most tokens on that prefix."""
        return list(slots_of(self._coverage.key_holders))

    @property
    def key_node(self) -> Node | None:
        """The key portion; None if nothing is cached."""
        return self._coverage.key_node

    @cached_property
    def homes(self) -> tuple[Node, list[int]] | None:
        """The replicated prefix that the prompt begins with, and who is to serve it; None if there is none."""
        found = self._rebalancer.homes(self._match.path)
        if found is None:
            return None
        node, slots = found
        allowed = [slot for slot in slots if self._eligible >> slot & 1]
        return (node, allowed) if allowed else None

    @cached_property
    def lightest_load_s(self) -> float:
        """The lowest L of any replica that may get the request."""
        return float(self.load_s[np.asarray(self.slots)].min())

    def sheds(self, slot: int) -> bool:
        """True if the replica is so much more loaded than the lightest that it should not be exploited."""
        return self._rebalancer.sheds(slot, float(self.load_s[slot]), self.lightest_load_s)

    @property
    def decode_ratio(self) -> NDArray[np.float64]:
        """Share of decoding in L, 0 where there is no load."""
        load_s = self.load_s
        return np.divide(self._window.decode_load_s, load_s, out=np.zeros(len(load_s)), where=load_s > 0)

    @cached_property
    def matched_tokens(self) -> NDArray[np.int64]:
        """Leading prompt tokens that each replica would serve from its cache: whole blocks, never the last token."""
        matched = np.zeros(len(self._fleet.num_requests), np.int64)
        for mask, tokens in self._index.matched_tokens(self._match, self._eligible):
            matched[_as_index(mask, len(matched))] = tokens
        usable = np.minimum(matched, max(self.request.num_prompt_tokens - 1, 0))
        block_size = self._fleet.block_size
        whole_blocks: NDArray[np.int64] = usable // block_size * block_size
        return whole_blocks

    def matched_on(self, slot: int) -> int:
        """As `matched_tokens`, for one replica. O(depth)."""
        usable = min(self._index.matched_on(self._match, slot), max(self.request.num_prompt_tokens - 1, 0))
        block_size = self._fleet.specs[slot].block_size
        return usable // block_size * block_size

    def costs(self, slots: Sequence[int]) -> CostTable:
        """Load cost L + M + P of these replicas: Algorithm 2. O(replicas + depth + victims)."""
        if len(slots) > 1:
            matched = self.matched_tokens[np.asarray(slots)].tolist()
        else:
            matched = [self.matched_on(slot) for slot in slots]
        num_tokens = self.request.num_prompt_tokens
        prefill = {tokens: self.cost_model.prefill_s(num_tokens - tokens, tokens) for tokens in set(matched)}
        return CostTable(
            slots,
            self._fleet.ids,
            matched,
            load_s=self.load_s[np.asarray(slots)].tolist(),
            eviction_s=[self._eviction_s(s, num_tokens - m) for s, m in zip(slots, matched, strict=True)],
            prefill_s=[prefill[tokens] for tokens in matched],
        )

    def _eviction_s(self, slot: int, missed_tokens: int) -> float:
        """M: seconds of recomputation to expect from what must be evicted to run the request there."""
        capacity = self._fleet.specs[slot].kv_capacity_tokens
        if capacity is None:
            return 0.0
        needed = missed_tokens + round(self._window.mean_output_tokens(slot))
        excess = self._index.holdings(slot).used_tokens + needed - capacity
        if excess <= 0:
            return 0.0
        return self._eviction_costs[slot].cost_s(excess, self._window.num_requests(slot), self._match.path)


class CostTable(Sequence[Candidate]):
    """The load cost of several replicas for one request. Reads as candidates, which are made when asked for."""

    __slots__ = ("_eviction_s", "_ids", "_load_s", "_matched", "_prefill_s", "_slots")

    def __init__(
        self,
        slots: Sequence[int],
        ids: Sequence[ReplicaId | None],
        matched: list[int],
        *,
        load_s: list[float],
        eviction_s: list[float],
        prefill_s: list[float],
    ) -> None:
        self._slots = slots
        self._ids = ids
        self._matched = matched
        self._load_s = load_s
        self._eviction_s = eviction_s
        self._prefill_s = prefill_s

    def cheapest(self, rng: Random) -> int:
        """The slot with the lowest cost, ties at random."""
        costs = map(sum, zip(self._load_s, self._eviction_s, self._prefill_s, strict=True))
        return lowest(self._slots, costs, rng)

    def __len__(self) -> int:
        return len(self._slots)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        replica_id = self._ids[self._slots[index]]
        assert replica_id is not None
        return Candidate(
            replica_id, self._matched[index], self._load_s[index], self._eviction_s[index], self._prefill_s[index]
        )


def lowest(slots: Iterable[int], costs: Iterable[float], rng: Random) -> int:
    """The slot with the lowest cost; ties are broken at random, so that equal replicas do not all fall on the first.

    >>> lowest([0, 3], [2.0, 1.0], Random(0))
    3
    """
    best: list[int] = []
    best_cost = float("inf")
    for slot, cost in zip(slots, costs, strict=True):
        if cost < best_cost:
            best, best_cost = [slot], cost
        elif cost == best_cost:
            best.append(slot)
    return best[0] if len(best) == 1 else rng.choice(best)


def _as_index(mask: int, size: int) -> list[int] | NDArray[np.bool_]:
    if mask.bit_count() <= 8:
        return list(slots_of(mask))
    packed = np.frombuffer(mask.to_bytes((size + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=size, bitorder="little").astype(np.bool_)
