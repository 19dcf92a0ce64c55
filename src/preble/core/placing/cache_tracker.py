"""What each replica is taken to cache: the prefix index, kept in step with what replicas do and report.

Theory of operation
-------------------
`PrefixIndex` is the structure; the `CacheTracker` decides what goes in and out of it. There are two kinds of replicas.

*With KV events*, a stored or evicted block changes the index at once. Reports come late, so a request keeps its prompt
in use until its reports must have come: from `place` to its end, and `report_grace_s` longer (a `KeptUse`).
The replica may cache blocks that were stored before anybody listened, and whose events nobody can have any more. Two
things show them. An answer with more `cached_tokens` than expected: that much of the prompt counts as cached. And a
stored event with an unknown parent: if its tokens continue a prompt that was just served there, it is located by that
prompt, and what precedes it counts as cached. What is learned so has no block names, so no event ends it: a later
answer that reports a loss does.

Blocks that leave the engine's memory for its host's are not gone: they move to another cache of the index, from which
the replica can load them (`Tiers`). A store that replicas share is such a cache too. Its removals are not reported, so
what it holds is an estimate: it ages, and answers correct it.

*Without KV events*, the index is an estimate. The first output token shows that the prompt has been computed: its whole
blocks count as cached. They count until the replica's capacity is exceeded (least recently used first), until nothing
has used them for `belief_ttl_s`, or until an answer reports a loss (`HitReports.is_loss`): other prompts lose what they
share of the missing part; and if most of the prefix was missing, so is whatever the replica had used no later (LRU).
Of a replica that only decodes nothing is estimated: mostly it caches nothing.

The index has a memory budget. When it is reached, the least recently used prefixes that no request of the window uses
are forgotten; then the oldest requests of the window stop counting for their prefixes, so that theirs can be forgotten;
and if even that is not enough, a prompt or a report is not taken in, which `num_unindexed` counts.

Source: Preble, "Global scheduler data structures"; reports, age and budget: docs/decisions/0001.
"""

from __future__ import annotations

import sys
from collections import deque
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

from preble.core.cluster.replicas import InFlightRequest
from preble.core.cluster.state import ClusterState
from preble.core.placing.hit_reports import HitReports
from preble.core.prefixes.cache_entry import ENTRY_BYTES, NAME_BYTES, RUN_BYTES
from preble.core.prefixes.matching import confirmed_on, find_parent, matched_on, usable_tokens
from preble.core.prefixes.radix_tree import NODE_BYTES, Match, Node
from preble.core.replica_index import ReplicaIndex, ReplicaSet
from preble.core.types import (
    TOKEN_BYTES,
    BlocksDemoted,
    BlocksEvicted,
    BlocksShared,
    BlocksStored,
    CacheDrift,
    PackedTokens,
    Request,
    Role,
    Tier,
)

_AGE_CHECK: Final = 1 / 16
"""How often the age of estimates is checked, as a part of the age at which they end."""

_AGE_BATCH: Final = 32
"""Cache entries of one replica that are forgotten at a time for their age, so that no request waits long for it."""

_SERVED: Final = 16
"""Prompts placed last on a replica with KV events, among which an event with an unknown parent is looked for."""


class KeptUse:
    """A finished request whose prompt stays in use: until the replica's reports must have arrived, or for as long as
    the replica keeps it for another one.
    """

    __slots__ = ("leaf", "replica", "until")

    def __init__(self, until: float, replica: ReplicaIndex, leaf: Node) -> None:
        self.until = until
        self.replica = replica
        self.leaf = leaf

    def __lt__(self, other: KeptUse) -> bool:
        return self.until < other.until


class CacheTracker:
    """What each replica caches, by replica index. The settings are those of `GlobalScheduler`.

    `num_unindexed`: prompts and reports for which the budget had no room. `next_timer`: when a kept use
    ends, or the age of estimates is to be checked; infinity if never.
    """

    def __init__(
        self,
        cluster: ClusterState,
        *,
        report_grace_s: float,
        belief_ttl_s: float,
        index_budget_bytes: int | None,
    ) -> None:
        self.num_unindexed = 0
        self._cluster = cluster
        self._index = cluster.index
        self._tiers = cluster.tiers
        self._replicas = cluster.replicas
        self._window = cluster.window
        self._report_grace_s = report_grace_s
        self._belief_ttl_s = belief_ttl_s
        self._budget_bytes = sys.maxsize if index_budget_bytes is None else index_budget_bytes
        self._kept: list[KeptUse] = []
        """A heap: the first one ends first."""
        self._reports: dict[ReplicaIndex, HitReports] = {}
        self._served: dict[ReplicaIndex, deque[tuple[Node, int]]] = {}
        self._check_age_at = inf
        self.next_timer = inf
        self._lost_events: set[ReplicaIndex] = set()
        self._estimated: ReplicaSet = 0

    def add_replica(self, replica: ReplicaIndex, now: float) -> None:
        self._reports[replica] = HitReports(self._replicas.block_size[replica])
        self._served[replica] = deque(maxlen=_SERVED)
        spec = self._replicas.specs[replica]
        # Mostly a replica that decodes caches nothing. So what it does not report is not taken to be there.
        if not spec.reports_events and spec.role is not Role.DECODE:
            self._estimated |= 1 << replica
        self._start_checking_age(replica, now)

    def remove_replica(self, replica: ReplicaIndex) -> None:
        """Forget the replica. Nothing in flight or in the window may refer to it any more."""
        self._forget_kept(replica)
        self._lost_events.discard(replica)
        self._estimated &= ~(1 << replica)
        del self._reports[replica], self._served[replica]

    def drift(self, replica: ReplicaIndex) -> CacheDrift:
        """Return what was expected to be cached there, and what was reported."""
        return self._reports[replica].drift

    # -- requests -----------------------------------------------------------------------------------------------------

    def place(self, replica: ReplicaIndex, request: Request, match: Match, now: float) -> Node:
        """Note that the replica's request uses its prompt from now on; return the node at which the prompt ends.

        `match`: of the prompt with the trees as they are now. Where the budget has no room for the rest of the prompt,
        only the part that is known already counts.
        """
        leaf = self._place(replica, request, match, now)
        if not self._estimated >> replica & 1:
            self._served[replica].append((leaf, leaf.end))
        return leaf

    def place_too(self, replica: ReplicaIndex, leaf: Node, now: float) -> None:
        """Note that a second replica uses a placed request's prompt, which ends in `leaf`."""
        self._index.place_too(replica, leaf, now)
        if not self._estimated >> replica & 1:
            self._served[replica].append((leaf, leaf.end))

    def usable_tokens(self, replica: ReplicaIndex, request: Request, match: Match) -> int:
        """Return leading prompt tokens that the replica, trusted or not, probably serves from its cache. O(depth)."""
        caches = self._index.caches
        held = (
            self._tiers.matched_on(replica, match, caches) if self._tiers.places else matched_on(match, caches[replica])
        )
        return usable_tokens(held, request.num_prompt_tokens, self._replicas.block_size[replica])

    def trusted_tokens(self, replica: ReplicaIndex, request: Request, match: Match) -> int:
        """Do as `usable_tokens`; return 0 on a replica that is not trusted."""
        return self.usable_tokens(replica, request, match) if self._replicas.trusts(replica) else 0

    def confirmed(self, replica: ReplicaIndex, match: Match) -> tuple[int, float]:
        """Do as `confirmed_on`, of the replica's memory and all its tiers. O(depth)."""
        tokens, used_s = confirmed_on(match, self._index.caches[replica])
        if self._tiers.places:
            for place in self._tiers.of(replica).values():
                tokens = max(tokens, confirmed_on(match, self._index.caches[place])[0])
        return tokens, used_s

    def computed(self, entry: InFlightRequest, now: float) -> None:
        """The prompt has been computed, so a replica without KV events is expected to cache its whole blocks.

        A store that replicas share is expected to get them, whether or not the replica reports events.
        """
        replica, spec = entry.replica, self._replicas.specs[entry.replica]
        block_size = min(spec.block_size, self._replicas.block_size[replica])
        num_tokens = entry.leaf.end // block_size * block_size
        if self._estimated >> replica & 1:
            self._index.set_computed(replica, entry.leaf, num_tokens, now)
            if self._index.caches[replica].is_crowded:
                self._evict_over_capacity(replica, now)
        if spec.store and self._has_room(_bytes_of_path(entry.leaf)):
            store = self._cluster.place_of(replica, Tier.STORE)
            self._index.set_computed(store, entry.leaf, num_tokens, now)
            self._index.caches[store].touch(entry.leaf, now)

    def computed_elsewhere(self, replica: ReplicaIndex, request: Request, match: Match, now: float) -> bool:
        """Note a prompt that the replica has computed for another gateway. Return False if its KV events report what it
        caches.
        """
        if not self._is_estimated(replica):
            return False
        leaf, block_size = self._place(replica, request, match, now), self._replicas.block_size[replica]
        self._index.set_computed(replica, leaf, leaf.end // block_size * block_size, now)
        self._index.release(replica, leaf)
        self._index.forget_use(replica, leaf)
        if self._index.caches[replica].is_crowded:
            self._evict_over_capacity(replica, now)
        return True

    def end(self, entry: InFlightRequest, now: float, *, work_done: bool, kept_s: float = 0.0) -> None:
        """The request is over. If its work was done, its prompt stays in use until the reports must have come.

        `kept_s`: for so long the replica itself keeps it for another one.
        """
        reports = work_done and not self._estimated >> entry.replica & 1
        self.release(entry.replica, entry.leaf, now + max(kept_s, self._report_grace_s if reports else 0.0), now)

    def release(self, replica: ReplicaIndex, leaf: Node, until: float, now: float) -> None:
        """Let a prompt be in use no longer, from `until` on."""
        if until > now:
            heappush(self._kept, KeptUse(until, replica, leaf))
            self._find_next()
        else:
            self._index.release(replica, leaf)
            if self._index.caches[replica].is_crowded:
                self._evict_over_capacity(replica, now)

    # -- what replicas report -----------------------------------------------------------------------------------------

    def stored(self, replica: ReplicaIndex, event: BlocksStored, namespace: str, now: float) -> bool:
        """Take in blocks that the replica stored, of this namespace of the index.

        False if nobody knows where they belong: their parent is unknown, or events that arrive again after a loss have
        not started over.
        """
        if replica in self._lost_events:
            return False
        match = self._locate(replica, event, namespace, now)
        while match is not None and not self._has_room(_growth_of_stored(match, event)):
            if not self._make_room(now):
                self.num_unindexed += 1
                return True
            match = self._index.locate(replica, event, namespace)
        if match is not None:
            self._index.stored(replica, match, event, now)
        return match is not None

    def _locate(self, replica: ReplicaIndex, event: BlocksStored, namespace: str, now: float) -> Match | None:
        """Return where the blocks belong: below their parent, or in a prompt that was just served there."""
        match = self._index.locate(replica, event, namespace)
        if match is not None:
            return match
        for leaf, end in reversed(self._served[replica]):
            parent = find_parent(leaf, end, event, namespace)
            if parent is not None:
                self._index.name_parent(replica, *parent, event, now)
                return self._index.locate(replica, event, namespace)
        return None

    def evicted(self, replica: ReplicaIndex, event: BlocksEvicted, now: float) -> None:
        """The replica evicted blocks. Ignored while its events are lost: they are not all of them."""
        if replica in self._lost_events:
            return
        host = self._tiers.of(replica).get(Tier.HOST)
        if event.tier is None:
            self._index.evicted(replica, event.block_hashes, now, also_from=host)
        elif event.tier is Tier.HOST and host is not None:
            self._index.evicted(host, event.block_hashes, now)

    def demoted(self, replica: ReplicaIndex, event: BlocksDemoted, now: float) -> None:
        """Blocks have left the engine's memory, but not the tier. Where the budget has no room, they are forgotten."""
        if replica in self._lost_events:
            return
        if self._has_room(len(event.block_hashes) * (ENTRY_BYTES + RUN_BYTES)):
            self._index.moved(replica, self._cluster.place_of(replica, event.tier), event.block_hashes, now)
        else:
            self._index.evicted(replica, event.block_hashes, now)

    def shared(self, replica: ReplicaIndex, event: BlocksShared, now: float) -> None:
        """Blocks were copied into the replica's store. Their removal is not reported, so they age."""
        if replica not in self._lost_events and self._has_room(len(event.block_hashes) * ENTRY_BYTES):
            store = self._cluster.place_of(replica, Tier.STORE)
            self._index.copied(replica, store, event.block_hashes, now)
            self._start_checking_age(replica, now)

    def cleared(self, replica: ReplicaIndex, now: float, *, is_past: bool, engine_only: bool = False) -> None:
        """The whole cache is gone. Unless `is_past`, requests that ended there will not be reported as stored.

        `engine_only`: but for what is in the host's memory.
        """
        if not is_past:
            for use in self._kept:
                if use.replica == replica:
                    self._index.release(replica, use.leaf)
            self._forget_kept(replica)
        self._index.clear(replica, now)
        host = self._tiers.of(replica).get(Tier.HOST)
        if host is not None and not engine_only:
            self._index.clear(host, now)
        if replica in self._lost_events:
            self._lost_events.remove(replica)
            self._estimated &= ~(1 << replica)
            self._replicas.block_size[replica] = self._replicas.specs[replica].block_size

    def events_lost(self, replica: ReplicaIndex, now: float) -> None:
        """The replica's events do not arrive: go on from what is known, by estimates, until its cache is cleared."""
        if not self._is_estimated(replica):
            self._lost_events.add(replica)
            self._estimated |= 1 << replica
            self._start_checking_age(replica, now)

    def compare(self, entry: InFlightRequest, cached_tokens: int, now: float) -> None:
        """Compare what was expected to be cached with what the replica says was cached. Before the request's `end`."""
        replica, expected_tokens = entry.replica, entry.confirmed_tokens
        cached_tokens = min(cached_tokens, entry.request.num_prompt_tokens)
        reports = self._reports[replica]
        reports.add(expected_tokens, cached_tokens)
        if cached_tokens > expected_tokens:
            self._index.set_computed(replica, entry.leaf, cached_tokens, now)
        is_loss = reports.is_loss(expected_tokens, cached_tokens)
        for place in self._tiers.of(replica).values() if is_loss else ():
            self._index.forget_end(place, entry.leaf, cached_tokens, now)
        if not self._is_estimated(replica):
            if is_loss:
                self._index.forget_beside(replica, entry.leaf, cached_tokens, now, keep_named=True)
            return
        reports.learn_block_size(cached_tokens)
        self._replicas.block_size[replica] = reports.block_size
        if reports.is_loss(expected_tokens, cached_tokens):  # in blocks of the size just learned
            self._index.forget_beside(replica, entry.leaf, cached_tokens, now)
            if 2 * cached_tokens < expected_tokens:
                self._index.forget_unused_since(replica, entry.confirmed_used_s, now)

    # -- time ---------------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """End what is over by now: requests of the load window, and reports that must have come. Amortised O(1).

        Learn of the replicas' speeds, if it is time.
        """
        if now >= self._window.next_expiry:
            for replica, leaf in self._window.expire(now):
                self._index.forget_use(replica, leaf)
        if now >= self._cluster.speeds.next_update:
            self._cluster.speeds.update(now)
        while self._kept and self._kept[0].until <= now:
            use = heappop(self._kept)
            self.release(use.replica, use.leaf, now, now)
            self._find_next()

    def expire_old(self, now: float) -> None:
        """Forget estimates that nothing has used for too long, if it is time to look. A part at a time: O(1)."""
        if self._check_age_at > now:
            return
        estimated = [replica for replica in self._replicas.specs if self._is_estimated(replica)]
        estimated += self._tiers.stores()
        limit_s = now - self._belief_ttl_s
        done = all(self._index.forget_unused_since(replica, limit_s, now, _AGE_BATCH) for replica in estimated)
        next_s = now + self._belief_ttl_s * _AGE_CHECK if done else now
        self._check_age_at = next_s if estimated else inf
        self._find_next()

    def kept_uses(self) -> list[tuple[ReplicaIndex, Node]]:
        """(replica index, leaf) of each request that is over and whose prompt is still in use; for tests."""
        return [(use.replica, use.leaf) for use in self._kept]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_estimated(self, replica: ReplicaIndex) -> bool:
        """Return True if no KV events of the replica arrive, so that the index is an estimate of its cache."""
        return bool(self._estimated >> replica & 1)

    def _start_checking_age(self, replica: ReplicaIndex, now: float) -> None:
        ages = self._is_estimated(replica) or Tier.STORE in self._tiers.of(replica)
        if ages and self._check_age_at == inf:
            self._check_age_at = now + self._belief_ttl_s * _AGE_CHECK
            self._find_next()

    def _forget_kept(self, replica: ReplicaIndex) -> None:
        self._kept = [use for use in self._kept if use.replica != replica]
        heapify(self._kept)
        self._find_next()

    def _find_next(self) -> None:
        self.next_timer = min(self._kept[0].until if self._kept else inf, self._check_age_at)

    def _evict_over_capacity(self, replica: ReplicaIndex, now: float) -> None:
        if self._estimated >> replica & 1:
            self._index.evict_down_to(replica, self._index.caches[replica].capacity, now)

    def _place(self, replica: ReplicaIndex, request: Request, match: Match, now: float) -> Node:
        index, prompt = self._index, request.prompt
        if not request.keeps_kv:
            return match.base
        if self._has_room(_growth_of_prompt(match, prompt)):
            return index.place(replica, match, prompt, now)
        while self._make_room(now):
            match = index.match(prompt, match.namespace)
            if self._has_room(_growth_of_prompt(match, prompt)):
                return index.place(replica, match, prompt, now)
        self.num_unindexed += 1
        match = index.match(prompt, match.namespace)
        if not self._has_room(len(match.path) * ENTRY_BYTES):
            return match.base
        return index.place(replica, match, prompt, now, known_only=True)

    def _has_room(self, growth_bytes: int) -> bool:
        return self._index.num_bytes + growth_bytes <= self._budget_bytes

    def _make_room(self, now: float) -> bool:
        """Forget what was used least recently; False if there is nothing left to forget.

        That may change what a match said, so match again afterwards.
        """
        oldest_use_s = self._window.oldest_use_s
        if self._index.drop_oldest(now, oldest_use_s):
            return True
        if oldest_use_s == inf:
            return False
        self._index.forget_use(*self._window.drop_oldest_use())
        return True


def _growth_of_prompt(match: Match, prompt: PackedTokens) -> int:
    """Return bytes by which the index grows at most if the prompt is placed."""
    return _growth(match, len(prompt) - match.num_tokens * TOKEN_BYTES)


def _bytes_of_path(leaf: Node) -> int:
    """Return the memory of an entry for each node of the path to `leaf`."""
    return ENTRY_BYTES * len(leaf.ancestors())


def _growth_of_stored(match: Match, event: BlocksStored) -> int:
    """Return bytes by which the index grows at most if the event is taken in."""
    new_bytes = len(event.tokens) - (match.num_tokens - match.base_tokens) * TOKEN_BYTES
    runs, names = len(match.path) + 2, len(event.tokens) // TOKEN_BYTES // event.block_size
    return _growth(match, new_bytes) + runs * RUN_BYTES + names * NAME_BYTES


def _growth(match: Match, new_bytes: int) -> int:
    """Return the memory of two nodes (a leaf, and a split or a root), an entry for each node of the path and for each
    that is split.
    """
    entries = len(match.path) + 2 + match.last.holders.bit_count()
    return new_bytes + 2 * NODE_BYTES + entries * ENTRY_BYTES
