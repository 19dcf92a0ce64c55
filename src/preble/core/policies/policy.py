"""What a placement policy is, and what it may see.

A policy chooses from a read-only `ClusterView`; all bookkeeping stays in `GlobalScheduler`, so that every policy is
compared on equal terms. What a view computes, it computes when first asked, once a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Protocol, overload

from preble.core.cluster.load_window import LoadWindow
from preble.core.cluster.rebalance import Rebalancer
from preble.core.cluster.replicas import ReplicaTable
from preble.core.costs.model import CostModel
from preble.core.prefixes.eviction_cost import EvictionCost
from preble.core.prefixes.index import PrefixIndex
from preble.core.prefixes.matching import PrefixMatch, coverage, in_use_on, matched_on, matched_tokens, usable_tokens
from preble.core.prefixes.radix_tree import Match, Node
from preble.core.replica_index import replicas_in
from preble.core.types import Candidate, Reason, ReplicaId, Request


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy's decision.

    `candidates`: what it weighed, for logs and explanations. `prefix`: where the prefix ends for whose sake the replica
    was chosen; its queueing is watched, and it may be replicated. None where there is no such prefix.
    """

    replica: int
    reason: Reason
    candidates: Sequence[Candidate] = ()
    prefix: Node | None = None


class Policy(Protocol):
    """One rule of placement. May keep state of its own; must not change the view."""

    @property
    def name(self) -> str: ...

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """The replica for `view.request`, one of `view.replicas`."""
        ...


class ClusterView:
    """The cluster as one request sees it.

    `replicas`: the replicas that may get it, ascending. Lists are indexed by slot and must not be written to; what they
    hold for other slots means nothing.
    """

    __slots__ = (
        "_coverage",
        "_eligible",
        "_eviction_costs",
        "_fleet",
        "_index",
        "_match",
        "_matched",
        "_now",
        "_num_tokens",
        "_prefill_s",
        "_rebalancer",
        "_trusted",
        "_window",
        "cost_model",
        "replicas",
        "request",
    )

    def __init__(
        self,
        request: Request,
        eligible: int,
        match: Match,
        *,
        fleet: ReplicaTable,
        index: PrefixIndex,
        window: LoadWindow,
        cost_model: CostModel,
        eviction_costs: dict[int, EvictionCost],
        rebalancer: Rebalancer,
        now: float,
    ) -> None:
        self.request = request
        self.cost_model = cost_model
        self.replicas: list[int] = fleet.live_replicas if eligible == fleet.live else replicas_in(eligible)
        self._eligible = eligible
        self._trusted = eligible & fleet.trusted
        self._match = match
        self._fleet = fleet
        self._index = index
        self._window = window
        self._eviction_costs = eviction_costs
        self._rebalancer = rebalancer
        self._now = now
        self._num_tokens = request.num_prompt_tokens
        self._coverage: PrefixMatch | None = None
        self._matched: dict[int, int] = {}
        self._prefill_s: dict[int, float] = {}

    def replica_id(self, replica: int) -> ReplicaId:
        return self._fleet.replica_id(replica)

    @property
    def replica_ids(self) -> tuple[ReplicaId | None, ...]:
        """Every replica's id, by slot; another object whenever one joins or leaves."""
        return self._fleet.ids

    @property
    def num_requests(self) -> list[int]:
        """Requests in flight."""
        return self._fleet.num_requests

    @property
    def waiting_prefill_tokens(self) -> list[int]:
        """Prompt tokens still to be computed, of requests in flight without a first token."""
        return self._fleet.waiting_prefill_tokens

    @property
    def waiting_prefill_s(self) -> list[float]:
        """Seconds of prefill that these tokens take."""
        return self._fleet.waiting_prefill_s

    @property
    def num_decoding(self) -> list[int]:
        """Requests in flight with a first token."""
        return self._fleet.num_decoding

    @property
    def load_s(self) -> list[float]:
        """L: seconds of work placed in the window."""
        return self._window.load_s

    @property
    def num_window_requests(self) -> list[int]:
        """Requests placed in the window, whether or not they have ended."""
        return self._window.num_requests

    @property
    def mean_output_tokens(self) -> list[float]:
        """Mean output length seen in the window."""
        return self._window.mean_output_tokens

    @property
    def requests_per_s(self) -> float:
        """Mean rate of requests to the whole cluster in the window. O(1)."""
        return self._window.requests_per_s(self._now)

    @property
    def known_prefix(self) -> Sequence[Node]:
        """The nodes that the prompt begins with, from the top; of the last one perhaps only the first tokens.

        Of each one `recent_uses` says how many requests of the window use it, and `full_holders` who has all of it.
        """
        return self._match.path

    @property
    def coverage(self) -> PrefixMatch:
        """What the replicas hold of the prompt, as far as they are trusted. O(depth) when first asked."""
        if self._coverage is None:
            self._coverage = coverage(self._match, self._index.caches, self._trusted)
        return self._coverage

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the holders of the key portion would serve from their caches at most: whole blocks."""
        return max(map(self.matched_on, self.key_holders), default=0)

    @property
    def key_holders(self) -> list[int]:
        """The replicas that hold the key portion: most of the node with the most tokens on the cached prefix."""
        return replicas_in(self.coverage.key_holders)

    def homes(self) -> tuple[Node, list[int]] | None:
        """The replicated prefix that the prompt begins with, and who is to serve it; None if there is none."""
        found = self._rebalancer.homes(self._match.path)
        if found is None:
            return None
        node, replicas = found
        allowed = [replica for replica in replicas if self._trusted >> replica & 1]
        return (node, allowed) if allowed else None

    def held_tokens(self, replica: int) -> int:
        """KV tokens that the replica holds or is about to hold."""
        return self._index.caches[replica].used_tokens

    def active_tokens(self, replica: int) -> int:
        """KV tokens of prompts in flight there if the request joins them; what several share counts once. O(depth).

        The output counts not, nobody tells how much there is. For `report_grace_s` after its end a prompt still counts
        on a replica that reports KV events.
        """
        cache = self._index.caches[replica]
        return cache.in_use_tokens + self._num_tokens - in_use_on(self._match, cache)

    def kv_usage(self, replica: int) -> float:
        """Share of the KV cache that prompts in flight take, each token once; 0 where the size is unknown."""
        return min(self._index.caches[replica].in_use_tokens / self._fleet.capacity[replica], 1.0)

    def lightest_load_s(self) -> float:
        """The lowest L of any replica that may get the request. O(replicas)."""
        load_s = self.load_s
        return min(load_s) if len(self.replicas) == len(load_s) else min([load_s[replica] for replica in self.replicas])

    def sheds(self, replica: int) -> bool:
        """True if the replica is so much more loaded than the lightest that it should not be exploited. O(replicas)."""
        return self._rebalancer.sheds(replica, self.load_s[replica], self.lightest_load_s())

    def decode_ratio(self, replica: int) -> float:
        """Share of decoding in L; 0 where there is no load."""
        load_s = self.load_s[replica]
        return self._window.decode_load_s[replica] / load_s if load_s > 0 else 0.0

    def matched_on(self, replica: int) -> int:
        """Leading prompt tokens that the replica would serve from its cache: whole blocks, never the last. O(depth).

        None on a replica that is not trusted.
        """
        matched = self._matched.get(replica)
        if matched is None:
            held = matched_on(self._match, self._index.caches[replica]) if self._trusted >> replica & 1 else 0
            matched = self._matched[replica] = usable_tokens(held, self._num_tokens, self._fleet.block_size[replica])
        return matched

    def prefill_s(self, matched_tokens: int) -> float:
        """P: seconds to compute the prompt where so many tokens of it are cached."""
        prefill_s = self._prefill_s.get(matched_tokens)
        if prefill_s is None:
            missed_tokens = self._num_tokens - matched_tokens
            prefill_s = self._prefill_s[matched_tokens] = self.cost_model.prefill_s(missed_tokens, matched_tokens)
        return prefill_s

    def matched_tokens(self, replicas: Sequence[int]) -> list[int]:
        """As `matched_on`, for each of several replicas. O(replicas + depth)."""
        if len(replicas) <= 2:
            return [self.matched_on(replica) for replica in replicas]
        sizes = self._fleet.block_size
        held = [0] * len(sizes)
        for mask, tokens in matched_tokens(self._match, self._index.caches, self._trusted):
            size, usable = 0, 0
            for replica in self._fleet.live_replicas if mask == self._fleet.live else replicas_in(mask):
                if sizes[replica] != size:  # most replicas have blocks of one size
                    size = sizes[replica]
                    usable = usable_tokens(tokens, self._num_tokens, size)
                held[replica] = usable
        if replicas is self.replicas and len(replicas) == len(held):
            return held
        return [held[replica] for replica in replicas]

    def costs(self, replicas: list[int]) -> CostTable:
        """Load cost L + M + P of these replicas: Algorithm 2. O(replicas + depth + victims)."""
        matched = self.matched_tokens(replicas)
        load_s = self.load_s
        return self.table(
            replicas,
            matched,
            load_s=[load_s[replica] for replica in replicas],
            prefill_s=[self.prefill_s(tokens) for tokens in matched],
        )

    def table(
        self, replicas: list[int], matched: list[int], *, load_s: list[float], prefill_s: list[float]
    ) -> CostTable:
        """As `costs`, with a policy's own reckoning of load and prefill. All lists are by position in `replicas`."""
        return CostTable(
            replicas,
            self._fleet.ids,
            matched,
            load_s=load_s,
            eviction_s=self._eviction_s(replicas, matched),
            prefill_s=prefill_s,
        )

    def _eviction_s(self, replicas: list[int], matched: list[int]) -> list[float]:
        """M: seconds of recomputation to expect from what must be evicted to run the request on each replica."""
        num_tokens, outputs, capacity = self._num_tokens, self._window.expected_output_tokens, self._fleet.capacity
        caches = self._index.caches
        costs_s = [0.0] * len(replicas)
        for i, replica in enumerate(replicas):
            excess = caches[replica].used_tokens + num_tokens - matched[i] + outputs[replica] - capacity[replica]
            if excess > 0:
                evictions = self._eviction_costs[replica]
                costs_s[i] = evictions.cost_s(int(excess), self.num_window_requests[replica], self._match.path)
        return costs_s


class CostTable(Sequence[Candidate]):
    """The load cost of several replicas for one request. Reads as candidates, which are made when asked for."""

    __slots__ = ("_eviction_s", "_ids", "_load_s", "_matched", "_prefill_s", "_slots")

    def __init__(
        self,
        replicas: list[int],
        ids: Sequence[ReplicaId | None],
        matched: list[int],
        *,
        load_s: list[float],
        eviction_s: list[float],
        prefill_s: list[float],
    ) -> None:
        self._slots = replicas
        self._ids = ids
        self._matched = matched
        self._load_s = load_s
        self._eviction_s = eviction_s
        self._prefill_s = prefill_s

    def cheapest(self, rng: Random) -> int:
        """The slot with the lowest cost, ties at random."""
        load_s, eviction_s, prefill_s = self._load_s, self._eviction_s, self._prefill_s
        lowest_s = inf
        best: list[int] = []
        for i, replica in enumerate(self._slots):
            cost_s = load_s[i] + eviction_s[i] + prefill_s[i]
            if cost_s < lowest_s:
                lowest_s, best = cost_s, [replica]
            elif cost_s == lowest_s:
                best.append(replica)
        return _any_of(best, rng)

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


def unweighed(view: ClusterView, replica: int) -> Choice:
    """A choice for which no costs were weighed; what the replica has cached is told all the same."""
    return Choice(replica, Reason.POLICY, (Candidate(view.replica_id(replica), view.matched_on(replica)),))


def lowest(replicas: Iterable[int], costs: Iterable[float], rng: Random) -> int:
    """The slot with the lowest cost; ties are broken at random, so that equal replicas do not all fall on the first.

    >>> lowest([0, 3], [2.0, 1.0], Random(0))
    3
    """
    known = list(costs)
    lowest_cost = min(known)
    best = [replica for replica, cost in zip(replicas, known, strict=True) if cost == lowest_cost]
    return _any_of(best, rng)


def _any_of(replicas: list[int], rng: Random) -> int:
    return replicas[0] if len(replicas) == 1 else rng.choice(replicas)
