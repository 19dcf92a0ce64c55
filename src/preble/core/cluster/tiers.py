"""Where replicas keep KV blocks besides their engines' memory: in the host's memory, and in stores that they may share.

Each such place is a cache of its own in the prefix index, at an index that no replica has. A place is taken to hold a
prompt from its first token on. So what a replica can use of a prompt is the longest of what its memory and its places
hold, and what is beyond its memory must be loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

from preble.core.costs.model import CostModel
from preble.core.prefixes.matching import matched_on, usable_tokens
from preble.core.prefixes.radix_tree import Match
from preble.core.prefixes.replica_cache import ReplicaCache
from preble.core.replica_index import ReplicaIndex, ReplicaSet
from preble.core.types import Tier


class Tiers:
    """The places of each replica, from the fastest. A store of a name is one place for all replicas that have it."""

    def __init__(self) -> None:
        self._places: dict[ReplicaIndex, dict[Tier, ReplicaIndex]] = {}
        self._stores: dict[str, ReplicaIndex] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def of(self, replica: ReplicaIndex) -> dict[Tier, ReplicaIndex]:
        """The places of a replica; do not change it."""
        return self._places.get(replica, {})

    def add(self, replica: ReplicaIndex, tier: Tier, place: ReplicaIndex) -> None:
        places = {**self.of(replica), tier: place}
        self._places[replica] = {tier: places[tier] for tier in Tier if tier in places}

    def store(self, name: str) -> ReplicaIndex | None:
        """The place of a store, if any replica has been on it."""
        return self._stores.get(name)

    def add_store(self, name: str, place: ReplicaIndex) -> None:
        self._stores[name] = place

    def remove_replica(self, replica: ReplicaIndex) -> list[ReplicaIndex]:
        """Forget a replica; returns its own places. Stores of a name outlive the replicas on them."""
        shared = self._stores.values()
        return [place for place in self._places.pop(replica, {}).values() if place not in shared]

    def stores(self) -> set[ReplicaIndex]:
        """The places of all stores, whether or not they have a name."""
        return {*self._stores.values(), *(p[Tier.STORE] for p in self._places.values() if Tier.STORE in p)}

    def reachable(self, replicas: ReplicaSet) -> ReplicaSet:
        """The places from which any of these replicas can load, as a set of indexes."""
        mask = 0
        for replica, places in self._places.items():
            if replicas >> replica & 1:
                for place in places.values():
                    mask |= 1 << place
        return mask

    def with_owners(self, holders: ReplicaSet) -> ReplicaSet:
        """These replicas and places, and the replicas that can load from one of the places."""
        mask = holders
        for replica, places in self._places.items():
            if any(holders >> place & 1 for place in places.values()):
                mask |= 1 << replica
        return mask

    def matched_on(self, replica: ReplicaIndex, match: Match, caches: Sequence[ReplicaCache]) -> int:
        """Leading tokens that the replica holds or can load. O(depth)."""
        places = self.of(replica).values()
        return max([matched_on(match, caches[one]) for one in (replica, *places)])

    def loads(
        self, replica: ReplicaIndex, match: Match, num_tokens: int, block_size: int, caches: Sequence[ReplicaCache]
    ) -> list[tuple[Tier, int]]:
        """The tokens of the prompt that the replica would load from each of its places, not from a faster one.

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
    """Seconds to load what is loaded of a prompt; no more than computing it would take."""
    in_memory = matched_tokens - sum(tokens for _, tokens in loads)
    computed_s = cost_model.prefill_s(num_tokens - in_memory, in_memory)
    saved_s = computed_s - cost_model.prefill_s(num_tokens - matched_tokens, matched_tokens)
    return min(sum(cost_model.load_s(tier, tokens) for tier, tokens in loads), max(saved_s, 0.0))
