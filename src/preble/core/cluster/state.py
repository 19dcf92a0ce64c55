"""What the global scheduler knows of the cluster, as one value that its parts share."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from preble.core.cluster.links import Links
from preble.core.cluster.load_window import LoadWindow
from preble.core.cluster.replicas import ReplicaTable
from preble.core.cluster.speeds import ReplicaSpeeds
from preble.core.cluster.standstill import Standstill
from preble.core.costs.model import CostModel
from preble.core.prefixes.eviction_cost import EvictionCost
from preble.core.prefixes.index import PrefixIndex
from preble.core.prefixes.matching import matched_on, usable_tokens
from preble.core.prefixes.radix_tree import Match
from preble.core.prefixes.replica_cache import ReplicaCache
from preble.core.replica_index import ReplicaIndex, ReplicaSet
from preble.core.types import NOTHING_LEARNED, Learned, ReplicaSpec, Tier


class Recomputation:
    """The share of computed tokens that were known already: the replicas had evicted them, or others cached them.

    What goes into a full cache pushes as much out of it, so this is also how likely what is evicted is to be computed
    again. `share`: between 0 and 1, and 0 while nothing has been evicted. It forgets as the caches do: once they have
    been filled again.
    """

    def __init__(self) -> None:
        self._computed = 0.0
        self._again = 0.0
        self.share = 0.0

    def note(self, computed_tokens: float, again_tokens: int, capacity_tokens: float) -> None:
        """A request has `computed_tokens` computed, output included; `again_tokens` of its prompt were known.

        `capacity_tokens`: of all caches together.
        """
        kept = exp(-computed_tokens / capacity_tokens)
        self._computed = self._computed * kept + computed_tokens
        self._again = self._again * kept + again_tokens
        self.share = self._again / self._computed if self._computed > 0 else 0.0


class Tiers:
    """Where replicas keep KV blocks besides their engines' memory: in the host's, and in stores that they may share.

    Each such place is a cache of its own in the prefix index, at an index that no replica has. A place is taken to hold
    a prompt from its first token on. So what a replica can use of a prompt is the longest of what its memory and its
    places hold, and what is beyond its memory must be loaded. The places of each replica begin with the fastest. A
    store of a name is one place for all replicas that have it. `places`: by replica, for those that have any.
    """

    def __init__(self) -> None:
        self.places: dict[ReplicaIndex, dict[Tier, ReplicaIndex]] = {}
        self._stores: dict[str, ReplicaIndex] = {}

    def of(self, replica: ReplicaIndex) -> dict[Tier, ReplicaIndex]:
        """Return the places of a replica; do not change it."""
        return self.places.get(replica, {})

    def add(self, replica: ReplicaIndex, tier: Tier, place: ReplicaIndex) -> None:
        places = {**self.of(replica), tier: place}
        self.places[replica] = {tier: places[tier] for tier in Tier if tier in places}

    def store(self, name: str) -> ReplicaIndex | None:
        """Return the place of a store, if any replica has been on it."""
        return self._stores.get(name)

    def add_store(self, name: str, place: ReplicaIndex) -> None:
        self._stores[name] = place

    def remove_replica(self, replica: ReplicaIndex) -> list[ReplicaIndex]:
        """Forget a replica; returns its own places. Stores of a name outlive the replicas on them."""
        shared = self._stores.values()
        return [place for place in self.places.pop(replica, {}).values() if place not in shared]

    def stores(self) -> set[ReplicaIndex]:
        """Return the places of all stores, whether or not they have a name."""
        return {*self._stores.values(), *(p[Tier.STORE] for p in self.places.values() if Tier.STORE in p)}

    def reachable(self, replicas: ReplicaSet) -> ReplicaSet:
        """Return the places from which any of these replicas can load, as a set of indexes."""
        mask = 0
        for replica, places in self.places.items():
            if replicas >> replica & 1:
                for place in places.values():
                    mask |= 1 << place
        return mask

    def with_owners(self, holders: ReplicaSet) -> ReplicaSet:
        """Return these replicas and places, and the replicas that can load from one of the places."""
        mask = holders
        for replica, places in self.places.items():
            if any(holders >> place & 1 for place in places.values()):
                mask |= 1 << replica
        return mask

    def matched_on(self, replica: ReplicaIndex, match: Match, caches: Sequence[ReplicaCache]) -> int:
        """Return leading tokens that the replica holds or can load. O(depth)."""
        places = self.of(replica).values()
        return max([matched_on(match, caches[one]) for one in (replica, *places)])

    def loads(
        self, replica: ReplicaIndex, match: Match, num_tokens: int, block_size: int, caches: Sequence[ReplicaCache]
    ) -> list[tuple[Tier, int]]:
        """Return the tokens of the prompt that the replica would load from each of its places, not from a faster one.

        The first item is what it has in its engine's memory, as of `Tier` None. O(depth).
        """
        reached = usable_tokens(matched_on(match, caches[replica]), num_tokens, block_size)
        loads: list[tuple[Tier, int]] = []
        for tier, place in self.of(replica).items():
            held = usable_tokens(matched_on(match, caches[place]), num_tokens, block_size)
            if held > reached:
                loads.append((tier, held - reached))
                reached = held
        return loads


def loading_s(loads: list[tuple[Tier, int]], cost_model: CostModel, num_tokens: int, matched_tokens: int) -> float:
    """Return seconds to load what is loaded of a prompt; no more than computing it would take."""
    in_memory = matched_tokens - sum(tokens for _, tokens in loads)
    computed_s = cost_model.prefill_s(num_tokens - in_memory, in_memory)
    saved_s = computed_s - cost_model.prefill_s(num_tokens - matched_tokens, matched_tokens)
    return min(sum(cost_model.load_s(tier, tokens) for tier, tokens in loads), max(saved_s, 0.0))


class ClusterState:
    """The replicas, what each caches, and the load in the window.

    `replicas`: the table, with counts of what is in flight. `index`: the prefix trees and each replica's cache entries.
    `window`: work placed lately. `speeds`: how much slower a replica is than the others. `eviction_costs`: M of each
    replica. `tiers`: their other places. `links`: over which they send each other KV. `standstill`: of answers while
    prompts are computed, noted where replicas split. `learned`: lengths of answers that are known from before.
    """

    def __init__(self, cost_model: CostModel, window_s: float, learned: Learned = NOTHING_LEARNED) -> None:
        self.cost_model = cost_model
        self.replicas = ReplicaTable()
        self.index = PrefixIndex(lengths=learned.lengths)
        self.window = LoadWindow(cost_model, window_s, learned.answer_tokens)
        self.recomputation = Recomputation()
        self.speeds = ReplicaSpeeds()
        self.eviction_costs: dict[ReplicaIndex, EvictionCost] = {}
        self.tiers = Tiers()
        self.links = Links()
        self.standstill = Standstill()

    def add_replica(self, spec: ReplicaSpec) -> ReplicaIndex:
        """Add a replica with an empty cache; returns its index."""
        replica = self.replicas.add(spec)
        self.index.add_replica(replica, spec.kv_capacity_tokens)
        self.window.add_replica(replica)
        self.speeds.add_replica(replica)
        self.links.add_replica(replica, spec.transfer_group, splits=spec.splits, role=spec.role)
        self.standstill.add_replica(replica)
        self.eviction_costs[replica] = EvictionCost(self.index.caches[replica], self.cost_model)
        if spec.store:
            self.place_of(replica, Tier.STORE)
        return replica

    def place_of(self, replica: ReplicaIndex, tier: Tier) -> ReplicaIndex:
        """Return where the replica keeps blocks in this tier: an index of its own, or of its store."""
        place = self.tiers.of(replica).get(tier)
        if place is None:
            store = self.replicas.specs[replica].store if tier is Tier.STORE else ""
            place = self.tiers.store(store) if store else None
            if place is None:
                place = self._add_place()
                if store:
                    self.tiers.add_store(store, place)
            self.tiers.add(replica, tier, place)
        return place

    def _add_place(self) -> ReplicaIndex:
        place = self.replicas.reserve()
        for table in (self.index, self.window, self.speeds, self.standstill):
            table.add_replica(place)
        return place

    def remove_replica(self, replica: ReplicaIndex) -> None:
        """Forget a replica on which nothing is in flight any more. O(its cache entries + requests in the window)."""
        self.window.remove_replica(replica)
        self.speeds.remove_replica(replica)
        self.links.remove_replica(replica, self.replicas.specs[replica].transfer_group)
        self.index.remove_replica(replica)
        for place in self.tiers.remove_replica(replica):
            self.index.remove_replica(place)
            self.replicas.give_back(place)
        self.replicas.remove(self.replicas.replica_id(replica))
        del self.eviction_costs[replica]

    def use(self, cost_model: CostModel) -> None:
        """Compute costs with another model from now on; see docs/decisions/0006. O(replicas)."""
        self.cost_model = cost_model
        self.window.use(cost_model)
        for replica in self.replicas.specs:
            self.eviction_costs[replica] = EvictionCost(self.index.caches[replica], cost_model)
