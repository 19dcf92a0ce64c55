"""What evicting from a replica to make room would cost, in seconds of GPU time: M of Algorithm 2.

M_i = sum over the nodes that would be evicted on i of prefill_s(evicted tokens) x N_j, where N_j is the share of the
requests placed on i in H that use node j. Victims in the replica's own order: least recently used first, leaves before
what is above them, part of a node where a part is enough, nothing in use.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from preble.core.costs.model import CostModel
from preble.core.prefixes.cache_entry import CacheEntry
from preble.core.prefixes.radix_tree import Node
from preble.core.prefixes.replica_cache import ReplicaCache


class EvictionCost:
    """M of one replica, as a function of the tokens to be freed.

    Remembers the victims met so far until the replica's cache changes, so that asking again is O(log victims).
    """

    def __init__(self, cache: ReplicaCache, cost_model: CostModel) -> None:
        self._cache = cache
        self._cost_model = cost_model
        self._version = -1
        self._num_requests = 0
        self._entries: Iterator[CacheEntry] = iter(())
        self._victims: list[CacheEntry] = []
        self._freed: list[int] = [0]
        self._cost_s: list[float] = [0.0]

    def cost_s(self, tokens: int, num_requests: int, in_use: tuple[Node, ...] = ()) -> float:
        """Return seconds of recomputation to expect if `tokens` are evicted. `num_requests`: placed on the replica in
        H.

        `in_use`: nodes that must stay, since the request for which room is made uses them. Where less than `tokens` can
        be evicted, the cost of evicting all that can. O(victims) the first time, or if one of them must stay.
        """
        if tokens <= 0:
            return 0.0
        kept = [
            entry for node in in_use if (entry := self._cache.entries.get(node)) and entry.held and not entry.ref_count
        ]
        if self._version != self._cache.version or self._num_requests != num_requests:
            self._start_over(num_requests)
        if kept:
            return self._cost_keeping_s(tokens, kept)
        while self._freed[-1] < tokens:
            if not self._find_next_victim():
                return self._cost_s[-1]
        i = bisect_left(self._freed, tokens) - 1
        return self._cost_s[i] + self._victim_s(self._victims[i], tokens - self._freed[i])

    def _cost_keeping_s(self, tokens: int, kept: list[CacheEntry]) -> float:
        cost_s = 0.0
        i = 0
        while tokens > 0 and (i < len(self._victims) or self._find_next_victim()):
            victim = self._victims[i]
            if victim not in kept:
                cost_s += self._victim_s(victim, min(tokens, victim.held))
                tokens -= victim.held
            i += 1
        return cost_s

    def _start_over(self, num_requests: int) -> None:
        self._version = self._cache.version
        self._num_requests = num_requests
        self._entries = self._cache.oldest_first()
        self._victims.clear()
        del self._freed[1:], self._cost_s[1:]

    def _find_next_victim(self) -> bool:
        for entry in self._entries:
            if entry.held and not entry.ref_count:
                self._victims.append(entry)
                self._freed.append(self._freed[-1] + entry.held)
                self._cost_s.append(self._cost_s[-1] + self._victim_s(entry, entry.held))
                return True
        return False

    def _victim_s(self, victim: CacheEntry, tokens: int) -> float:
        share = victim.recent_uses / self._num_requests if self._num_requests else 0.0
        return self._cost_model.prefill_s(tokens) * share if share else 0.0
