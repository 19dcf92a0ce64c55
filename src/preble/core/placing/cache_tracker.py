"""What the replicas are believed to hold, kept in step with what they do and say.

`PrefixIndex` is the structure; this is its keeper. It decides when a prompt in flight counts as held, when a promise
ends, when a belief that nothing confirms is too old, and what there is no room for in the memory budget.
Source: Preble, "Global scheduler data structures"; promises, age and budget: docs/decisions/0001.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

from preble.core.cluster.load_window import LoadWindow
from preble.core.cluster.replicas import InFlightRequest, ReplicaTable
from preble.core.placing.index_budget import IndexBudget, growth_of_known, growth_of_prompt, growth_of_stored
from preble.core.prefixes.index import PrefixIndex
from preble.core.prefixes.matching import matched_on, usable_tokens
from preble.core.prefixes.radix_tree import Match, Node
from preble.core.types import BlocksEvicted, BlocksStored, CacheDrift, Request

_AGE_CHECK = 1 / 16
"""How often beliefs are checked for age, as a part of the age at which they end."""

_AGE_BATCH = 32
"""Records of one replica that are forgotten at a time for their age, so that no request has to wait long for it."""


@dataclass(slots=True)
class PendingReport:
    """A finished request whose prompt stays pinned until the replica's reports must have arrived."""

    until: float
    replica: int
    leaf: Node


class CacheTracker:
    """Who holds what, by slot. The settings are those of `GlobalScheduler`; its `check` covers this too.

    `num_unindexed`: prompts and reports that the budget left no room for.
    """

    def __init__(
        self,
        index: PrefixIndex,
        fleet: ReplicaTable,
        window: LoadWindow,
        *,
        report_grace_s: float,
        belief_ttl_s: float,
        index_budget_bytes: int | None,
    ) -> None:
        self.num_unindexed = 0
        self._index = index
        self._fleet = fleet
        self._report_grace_s = report_grace_s
        self._belief_ttl_s = belief_ttl_s
        self._budget = IndexBudget(index, window, index_budget_bytes)
        self._graces: deque[PendingReport] = deque()
        self._drift: dict[int, CacheDrift] = {}
        self._check_age_at: float | None = None

    def add_replica(self, replica: int, now: float) -> None:
        self._index.add_replica(replica)
        self._drift[replica] = CacheDrift()
        if self._is_unreported(replica) and self._check_age_at is None:
            self._check_age_at = now + self._belief_ttl_s * _AGE_CHECK

    def remove_replica(self, replica: int) -> None:
        """Nothing in flight or in the window may refer to the replica any more."""
        self._graces = deque(grace for grace in self._graces if grace.replica != replica)
        self._index.remove_replica(replica)
        del self._drift[replica]

    def drift(self, replica: int) -> CacheDrift:
        return self._drift[replica]

    # -- requests -----------------------------------------------------------------------------------------------------

    def place(self, replica: int, request: Request, match: Match, now: float) -> Node:
        """The prompt is held by the replica from now on, or about to be; returns the node at which it ends.

        Where the budget has no room for it, only what is known of it already counts.
        """
        index, prompt, namespace = self._index, request.prompt, request.namespace
        if self._budget.has_room(growth_of_prompt(match, prompt)):
            return index.place(replica, match, prompt, namespace, now)
        made_room = self._budget.make_room(lambda: growth_of_prompt(index.match(prompt, namespace), prompt), now)
        match = index.match(prompt, namespace)
        if made_room:
            return index.place(replica, match, prompt, namespace, now)
        self.num_unindexed += 1
        known = match.whole if self._budget.has_room(growth_of_known(match)) else []
        return index.place_on(replica, known, namespace, now)

    def usable_tokens(self, replica: int, request: Request, match: Match) -> int:
        """Leading prompt tokens that the replica, trusted or not, is believed to serve from its cache. O(depth)."""
        held = matched_on(match, self._index.holdings[replica])
        return usable_tokens(held, request.num_prompt_tokens, self._fleet.block_size[replica])

    def computed(self, flight: InFlightRequest, now: float) -> None:
        """The prompt has been computed: a replica that reports nothing is believed to hold its whole blocks."""
        replica = flight.replica
        if self._is_unreported(replica):
            self._index.believe_held(replica, flight.leaf, self._fleet.block_size[replica], now)
            self._evict_over_capacity(replica, now)

    def end(self, flight: InFlightRequest, now: float, *, work_done: bool) -> None:
        """The request is over. If its work was done, its promise outlives it until the reports must have come."""
        if work_done and not self._is_unreported(flight.replica):
            self._graces.append(PendingReport(now + self._report_grace_s, flight.replica, flight.leaf))
        else:
            self._index.unpin(flight.replica, flight.leaf)
            self._evict_over_capacity(flight.replica, now)

    # -- what replicas say --------------------------------------------------------------------------------------------

    def stored(self, replica: int, event: BlocksStored, now: float) -> bool:
        """False if what is before the blocks is unknown, so that they cannot be located."""
        if not self._budget.make_room(lambda: growth_of_stored(self._index, replica, event), now):
            self.num_unindexed += 1
            return True
        return self._index.stored(replica, event, now)

    def evicted(self, replica: int, event: BlocksEvicted, now: float) -> None:
        self._index.evicted(replica, event, self._fleet.block_size[replica], now)

    def cleared(self, replica: int, now: float, *, is_past: bool) -> None:
        """The whole cache is gone. Unless `is_past`, nothing that ended there will be reported as stored any more."""
        if not is_past:
            for grace in self._graces:
                if grace.replica == replica:
                    self._index.unpin(replica, grace.leaf)
            self._graces = deque(grace for grace in self._graces if grace.replica != replica)
        self._index.clear(replica, now)

    def compare(self, flight: InFlightRequest, cached_tokens: int, now: float) -> None:
        """Hold the belief against what the replica says that it had cached.

        A replica that has lost a prefix has also lost whatever it had used no later than that (LRU).
        """
        drift = self._drift[flight.replica]
        drift.num_requests += 1
        drift.predicted_tokens += flight.confirmed_tokens
        drift.reported_tokens += cached_tokens
        if self._is_unreported(flight.replica) and cached_tokens < flight.confirmed_tokens:
            self._index.forget_unused_since(flight.replica, flight.confirmed_used_s, now)

    # -- time ---------------------------------------------------------------------------------------------------------

    def next_timer(self) -> float:
        """When a promise ends, or beliefs are to be checked for age; infinity if never."""
        grace_s = self._graces[0].until if self._graces else inf
        return grace_s if self._check_age_at is None else min(grace_s, self._check_age_at)

    def expire_promises(self, now: float) -> None:
        """Amortised O(1)."""
        while self._graces and self._graces[0].until <= now:
            grace = self._graces.popleft()
            self._index.unpin(grace.replica, grace.leaf)

    def expire_old(self, now: float) -> None:
        """Forget what nothing has confirmed for too long, if it is time to look. A part at a time: O(1)."""
        if self._check_age_at is None or self._check_age_at > now:
            return
        unreported = [replica for replica in self._fleet.specs if self._is_unreported(replica)]
        limit_s = now - self._belief_ttl_s
        done = all(self._index.forget_unused_since(replica, limit_s, now, _AGE_BATCH) for replica in unreported)
        next_s = now + self._belief_ttl_s * _AGE_CHECK if done else now
        self._check_age_at = next_s if unreported else None

    def promises(self) -> list[tuple[int, Node]]:
        """(slot, leaf) of each promise that has outlived its request; for tests."""
        return [(grace.replica, grace.leaf) for grace in self._graces]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_unreported(self, replica: int) -> bool:
        """True if no event of this replica corrects what is believed of it."""
        return not self._fleet.specs[replica].reports_events

    def _evict_over_capacity(self, replica: int, now: float) -> None:
        capacity = self._fleet.specs[replica].kv_capacity_tokens
        if capacity is not None and self._is_unreported(replica):
            self._index.evict_down_to(replica, capacity, now)
