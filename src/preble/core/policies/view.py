"""What a placement policy may see: the cluster as one request finds it.

What a view computes, it computes when asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from preble.core.cluster.links import PrefixCopy
from preble.core.cluster.state import ClusterState, loading_s
from preble.core.costs.model import CostModel
from preble.core.policies.cost_table import CostTable
from preble.core.prefixes.history import PrefixHistory
from preble.core.prefixes.matching import (
    PrefixMatch,
    confirmed_on,
    in_use_on,
    matched_on,
    matched_tokens,
    prefix_match,
    usable_tokens,
)
from preble.core.prefixes.radix_tree import Match
from preble.core.replica_index import ReplicaIndex, ReplicaSet, replicas_in
from preble.core.types import ReplicaId, Request, Tier


class PromptPiece:
    """A piece of a prompt that earlier requests had at the same place: tokens `start` to `end`.

    The last piece may be longer than what the prompt has of it. `holders`: how many replicas cache all of it.
    `uses_per_s`: requests a second of late that begin with the prefix that ends here.
    """

    __slots__ = ("_history", "_now", "end", "holders", "start", "uses_per_s")

    def __init__(self, start: int, end: int, holders: int, history: PrefixHistory | None, now: float) -> None:
        self.start = start
        self.end = end
        self.holders = holders
        self.uses_per_s = history.uses_per_s(now) if history is not None else 0.0
        self._history, self._now = history, now

    def later_uses(self, ready_s: float) -> float:
        """Return how many such requests to expect `ready_s` from now or later, if they go on as long as they have."""
        return self._history.later_uses(self._now, ready_s) if self._history is not None else 0.0


class ClusterView:
    """The cluster as one request finds it, read-only.

    A policy may look at it in two ways. `candidates` has an object for each replica: easy to write. `replicas` are
    the same replicas as indexes, ascending, and the lists are by index: fast, for policies that weigh hundreds of
    replicas. Do not write to the lists; what they hold for other indexes means nothing.

    For policies that `watch`: `match`, where the prompt leads in the tree; `eligible`, the same replicas as a set, and
    `trusted`, those of them whose matches count; `now`.
    """

    __slots__ = (
        "_cluster",
        "_key_holders",
        "_matched",
        "_matched_everywhere",
        "_matched_replica",
        "_num_tokens",
        "_prefill_s",
        "_prefill_tokens",
        "_prefix_match",
        "_table",
        "_window",
        "eligible",
        "match",
        "now",
        "replicas",
        "request",
        "trusted",
    )

    def __init__(self, request: Request, eligible: ReplicaSet, match: Match, cluster: ClusterState, now: float) -> None:
        table = cluster.replicas
        self.request = request
        self.replicas: list[ReplicaIndex] = table.live_replicas if eligible == table.live else replicas_in(eligible)
        self.eligible = eligible
        self.trusted = eligible & table.trusted
        self.match = match
        self._cluster = cluster
        self._table = table
        self._window = cluster.window
        self.now = now
        self._num_tokens = request.num_prompt_tokens
        self._prefix_match: PrefixMatch | None = None
        self._key_holders: list[ReplicaIndex] | None = None
        # The last answers of `matched_tokens`, `matched_on` and `prefill_s`; neighbours mostly ask alike.
        self._matched_everywhere: list[int] = []
        self._matched_replica, self._matched = -1, 0
        self._prefill_tokens, self._prefill_s = -1, 0.0

    @property
    def candidates(self) -> list[ReplicaView]:
        """The replicas that may get the request, as objects, in the order of `replicas`; a new list."""
        return [ReplicaView(self, replica) for replica in self.replicas]

    @property
    def cost_model(self) -> CostModel:
        return self._cluster.cost_model

    def replica_id(self, replica: ReplicaIndex) -> ReplicaId:
        return self._table.replica_id(replica)

    @property
    def replica_ids(self) -> tuple[ReplicaId | None, ...]:
        """Every replica's id by index, None at an unused one; a new tuple whenever a replica joins or leaves."""
        return self._table.ids

    @property
    def num_requests(self) -> list[int]:
        """Requests in flight."""
        return self._table.num_requests

    @property
    def waiting_prefill_tokens(self) -> list[int]:
        """Prompt tokens still to be computed, of requests in flight without a first token."""
        return self._table.waiting_prefill_tokens

    @property
    def waiting_prefill_s(self) -> list[float]:
        """Seconds of prefill that these tokens take."""
        return self._scaled(self._table.waiting_prefill_s)

    @property
    def num_decoding(self) -> list[int]:
        """Requests in flight with a first token."""
        return self._table.num_decoding

    @property
    def load_s(self) -> list[float]:
        """L: seconds of work placed in the window, on a slower replica so much more."""
        return self._scaled(self._window.load_s)

    def slowness(self, replica: ReplicaIndex) -> float:
        """Return how many times as long as a typical replica this one takes for the same work."""
        slowness = self._cluster.speeds.slowness
        return 1.0 if slowness is None else slowness[replica]

    @property
    def has_slow_replicas(self) -> bool:
        """Whether any replica takes longer than a typical one."""
        return self._cluster.speeds.slowness is not None

    @property
    def decode_pace(self) -> float:
        """How many times as long as the cost model says decoding takes, compared with prefill; 1.0 if about right."""
        return self._cluster.speeds.decode_pace

    def _scaled(self, seconds: list[float]) -> list[float]:
        slowness = self._cluster.speeds.slowness
        if slowness is None:
            return seconds
        return [value * factor for value, factor in zip(seconds, slowness, strict=False)]

    @property
    def decode_load_s(self) -> list[float]:
        """The part of L that is decoding, in seconds."""
        return self._scaled(self._window.decode_load_s)

    @property
    def num_window_requests(self) -> list[int]:
        """Requests placed in the window, whether or not they have ended."""
        return self._window.num_requests

    @property
    def mean_output_tokens(self) -> list[float]:
        """Mean output length seen in the window."""
        return self._window.mean_output_tokens

    @property
    def typical_prompt_tokens(self) -> float:
        """Geometric mean of the prompts' lengths in the window, on any replica; 0 where there was none."""
        return self._window.typical_prompt_tokens

    @property
    def expected_output_tokens(self) -> float:
        """Length of the answer to expect, from earlier answers to what this prompt begins with. O(depth)."""
        return self._cluster.expected_output_tokens(self.match.path)

    @property
    def output_tokens_in_flight(self) -> list[int]:
        """Output tokens to expect of the requests in flight on each replica, those that have come included."""
        return self._table.expected_output_tokens

    @property
    def requests_per_s(self) -> float:
        """Mean rate of requests in the window to all of `replicas`. O(1) where they are the whole cluster."""
        if len(self.replicas) == len(self._table.live_replicas):
            return self._window.requests_per_s(self.now)
        return self._window.requests_per_s(self.now, self.replicas)

    def pieces(self, until: int, beyond: int = 0) -> list[PromptPiece]:
        """Return what the trees know of the prompt: the pieces that reach beyond token `beyond`, up to token `until`.

        O(depth).
        """
        found = []
        for node in self.match.path:
            if node.start >= until:
                break
            if node.end <= beyond:
                continue
            holders = (node.full_holders & self._table.live).bit_count()
            found.append(PromptPiece(node.start, node.end, holders, node.history, self.now))
        return found

    @property
    def recomputed_share(self) -> float:
        """How likely what is evicted is to be computed again, between 0 and 1; see `Recomputation`."""
        return self._cluster.recomputation.share

    @property
    def known_tokens(self) -> int:
        """Leading prompt tokens in the trees, whether or not a replica caches them; never the last token."""
        return min(self.match.num_tokens, max(self._num_tokens - 1, 0))

    def _cached_prefix(self) -> PrefixMatch:
        """Return the part of the prompt that trusted replicas cache or can load. O(depth) when first asked."""
        found = self._prefix_match
        if found is None:
            among = self.trusted
            if self._cluster.tiers.places:
                among |= self._cluster.tiers.reachable(among)
            found = self._prefix_match = prefix_match(self.match, self._cluster.index.caches, among)
        return found

    @property
    def cached_tokens(self) -> int:
        """The most prompt tokens that any holder of the key portion would serve from its cache: whole blocks."""
        cached = 0
        for replica in self.key_holders:
            matched = self.matched_on(replica)
            if matched > cached:
                cached = matched
        return cached

    @property
    def key_holders(self) -> list[ReplicaIndex]:
        """The holders of the key portion: they cache, or can load, most of the largest node on the cached prefix."""
        found = self._key_holders
        if found is None:
            holders = self._cached_prefix().key_holders
            if self._cluster.tiers.places:
                holders = self._cluster.tiers.with_owners(holders) & self.trusted
            found = self._key_holders = replicas_in(holders)
        return found

    @property
    def key_prefix_tokens(self) -> int:
        """Where the key portion ends, in tokens from the prompt's start; 0 if no replica caches anything of it."""
        node = self._cached_prefix().key_node
        return 0 if node is None else node.end

    def held_tokens(self, replica: ReplicaIndex) -> int:
        """Return the KV tokens that the replica caches or is about to cache."""
        return self._cluster.index.caches[replica].used_tokens

    def active_tokens(self, replica: ReplicaIndex) -> int:
        """Return the KV tokens of the prompts in flight on the replica and of this one; shared prefixes count once.
        O(depth).

        Output tokens do not count: their number is unknown. On a replica that reports KV events a finished prompt
        counts for another `report_grace_s`.
        """
        cache = self._cluster.index.caches[replica]
        return cache.in_use_tokens + self._num_tokens - in_use_on(self.match, cache)

    def has_room(self, replica: ReplicaIndex, missed_tokens: float) -> bool:
        """Return whether the replica can cache these tokens and evict nothing."""
        return self._cluster.index.caches[replica].used_tokens + missed_tokens <= self._table.capacity[replica]

    def kv_usage(self, replica: ReplicaIndex) -> float:
        """Return the share of the KV cache that prompts in flight take, each token once; 0 if its size is unknown."""
        return min(self._cluster.index.caches[replica].in_use_tokens / self._table.capacity[replica], 1.0)

    def lightest_load_s(self) -> float:
        """Return the lowest L of any replica that may get the request. O(replicas)."""
        load_s = self.load_s
        return min(load_s) if len(self.replicas) == len(load_s) else min([load_s[replica] for replica in self.replicas])

    def decode_ratio(self, replica: ReplicaIndex) -> float:
        """Return the share of decoding in L; 0 where there is no load."""
        load_s = self._window.load_s[replica]
        return self._window.decode_load_s[replica] / load_s if load_s > 0 else 0.0

    def matched_on(self, replica: ReplicaIndex) -> int:
        """Return leading prompt tokens that the replica would serve from its cache: whole blocks, never the last token.

        0 on a replica that is not trusted. O(depth).
        """
        if self._matched_everywhere:
            return self._matched_everywhere[replica]
        if replica != self._matched_replica:
            held = self._held_on(replica) if self.trusted >> replica & 1 else 0
            self._matched = usable_tokens(held, self._num_tokens, self._table.block_size[replica])
            self._matched_replica = replica
        return self._matched

    def _held_on(self, replica: ReplicaIndex) -> int:
        caches = self._cluster.index.caches
        if self._cluster.tiers.places:
            return self._cluster.tiers.matched_on(replica, self.match, caches)
        return matched_on(self.match, caches[replica])

    @property
    def has_tiers(self) -> bool:
        """Whether any replica has KV outside its engine's memory, which it would have to load."""
        return bool(self._cluster.tiers.places)

    def loaded_tokens(self, replica: ReplicaIndex) -> int:
        """Return tokens of `matched_on` that the replica must load into its engine's memory first. O(depth)."""
        return sum([tokens for _, tokens in self._loads(replica)]) if self._cluster.tiers.places else 0

    def loading_s(self, replica: ReplicaIndex) -> float:
        """Return seconds that takes; no more than to compute them. O(depth)."""
        loads = self._loads(replica) if self._cluster.tiers.places else []
        return loading_s(loads, self.cost_model, self._num_tokens, self.matched_on(replica)) if loads else 0.0

    def _loads(self, replica: ReplicaIndex) -> list[tuple[Tier, int]]:
        if not self.trusted >> replica & 1:
            return []
        size = self._table.block_size[replica]
        return self._cluster.tiers.loads(replica, self.match, self._num_tokens, size, self._cluster.index.caches)

    @property
    def has_copies(self) -> bool:
        """Whether any replicas can copy KV from each other."""
        return bool(self._cluster.links.groups) and self.request.keeps_kv

    def copies(self) -> list[PrefixCopy | None]:
        """Return for each of `replicas` the copy after which it would serve most from its cache; None where another
        replica of its group has no more than it.

        Only what the source has computed already counts, and only in its engine's memory. O(replicas x depth).
        """
        found: list[PrefixCopy | None] = [None] * len(self.replicas)
        for members in self._cluster.links.groups.values():
            source, held = self._best_source(members)
            if held:
                for i, replica in enumerate(self.replicas):
                    if members >> replica & 1 and replica != source:
                        found[i] = self._copy(source, held, replica)
        return found

    def _best_source(self, members: ReplicaSet) -> tuple[ReplicaIndex, int]:
        """Return the replica of a group with most of the prompt, and how many tokens; 0 where no replica has any.

        Among equals the one that has least to send.
        """
        best, best_tokens, best_until = ReplicaIndex(-1), 0, inf
        holders = self.match.path[0].holders if self.match.path else 0
        for replica in replicas_in(holders & members & self._table.trusted):
            cache = self._cluster.index.caches[replica]
            held = confirmed_on(self.match, cache)[0]
            if cache.is_crowded:
                held = min(held, matched_on(self.match, cache))
            tokens = usable_tokens(held, self._num_tokens, self._table.block_size[replica])
            until = self._cluster.links.sending_until(replica)
            if tokens > best_tokens or (tokens == best_tokens > 0 and until < best_until):
                best, best_tokens, best_until = replica, tokens, until
        return best, best_tokens

    def _copy(self, source: ReplicaIndex, held: int, replica: ReplicaIndex) -> PrefixCopy | None:
        tokens = held - self.matched_on(replica)
        if tokens <= 0 or not self.trusted >> replica & 1:
            return None
        link_s = self.cost_model.link_s(tokens)
        start = self._cluster.links.free_at(source, replica, self.now)
        return PrefixCopy(source, held, tokens, link_s, start - self.now + link_s + self.cost_model.link_latency_s)

    @property
    def splitting(self) -> list[list[int]]:
        """Return which of `replicas` may split a request among them, by position: the members of each group.

        O(replicas x groups); O(1) where none may.
        """
        links, may = self._cluster.links, self._cluster.links.splitting & self.trusted
        if not may:
            return []
        groups = [members & may for members in links.groups.values()]
        places = [[i for i, replica in enumerate(self.replicas) if members >> replica & 1] for members in groups]
        return [members for members in places if len(members) > 1]

    def split(self, source: int, target: int, own_s: float) -> PrefixCopy | None:
        """Return the split where `replicas[source]` computes the prompt, in `own_s` with its wait, and sends what
        `replicas[target]` lacks of it; None where that is nothing.
        """
        at, to = self.replicas[source], self.replicas[target]
        matched = usable_tokens(self._num_tokens, self._num_tokens, self._table.block_size[to])
        tokens = matched - self.matched_on(to)
        if tokens <= 0:
            return None
        link_s = self.cost_model.link_s(tokens)
        starts_s = max(self._cluster.links.free_at(at, to, self.now) - self.now, own_s)
        seconds = starts_s + link_s + self.cost_model.link_latency_s
        return PrefixCopy(at, matched, tokens, link_s, seconds, self.matched_on(at))

    def standstill(self, replica: ReplicaIndex) -> float:
        """Return for which share of the time answers on the replica stood still of late, while it computed prompts.

        Known where replicas split alone.
        """
        return self._cluster.standstill.share(replica, self.now) * self.slowness(replica)

    @property
    def even_standstill(self) -> float:
        """For which share they would have, had prompts and answers been spread evenly."""
        return self._cluster.standstill.even_share(len(self._table.live_replicas), self.now)

    def prefill_s(self, matched_tokens: int) -> float:
        """P: seconds to compute the prompt where `matched_tokens` of it are cached."""
        if matched_tokens != self._prefill_tokens:
            self._prefill_tokens = matched_tokens
            self._prefill_s = self._cluster.cost_model.prefill_s(self._num_tokens - matched_tokens, matched_tokens)
        return self._prefill_s

    def first_token_s(self, replica: ReplicaIndex) -> float:
        """Return seconds to the request's first token: what waits there, then its own prompt, at the replica's speed.
        O(depth).
        """
        own_s = self.prefill_s(self.matched_on(replica)) + self.loading_s(replica)
        return (self._table.waiting_prefill_s[replica] + own_s) * self.slowness(replica)

    def tpot_s(self, replica: ReplicaIndex, *, alone: bool = False) -> float:
        """Return seconds between two tokens once the request and all that are in flight there decode together; `alone`:
        if nothing were in flight.
        """
        prompts_tokens, together = self._num_tokens, 1
        if not alone:
            prompts_tokens += self._table.decoding_tokens[replica] + self._table.waiting_prefill_tokens[replica]
            together += self._table.num_requests[replica]
        step_s = self.cost_model.decode_iteration_s(together, prompts_tokens)
        return step_s * self.decode_pace * self.slowness(replica)

    def matched_tokens(self, replicas: Sequence[ReplicaIndex]) -> list[int]:
        """Do as `matched_on`, for each of several replicas. O(replicas + depth)."""
        if len(replicas) <= 2:
            return [self.matched_on(replica) for replica in replicas]
        sizes, index = self._table.block_size, self._cluster.index
        held = [0] * len(sizes)
        for mask, tokens in matched_tokens(self.match, index.caches, self.trusted, index.crowded):
            size, usable = sizes[0], usable_tokens(tokens, self._num_tokens, sizes[0])
            if mask == self._table.live and sizes.count(size) == len(sizes):
                held = [usable] * len(sizes)
                continue
            for replica in self._table.live_replicas if mask == self._table.live else replicas_in(mask):
                if sizes[replica] != size:  # most replicas have blocks of one size
                    size = sizes[replica]
                    usable = usable_tokens(tokens, self._num_tokens, size)
                held[replica] = usable
        if self._cluster.tiers.places:
            for replica in replicas:
                held[replica] = self.matched_on(replica)
        if len(replicas) == len(self.replicas):
            self._matched_everywhere = held
        if replicas is self.replicas and len(replicas) == len(held):
            return held
        return [held[replica] for replica in replicas]

    def costs(self, replicas: list[ReplicaIndex]) -> CostTable:
        """Load cost L + M + P of these replicas: Algorithm 2. O(replicas + depth + victims)."""
        matched = self.matched_tokens(replicas)
        load_s = self.load_s
        return self.table(
            replicas,
            matched,
            load_s=[load_s[replica] for replica in replicas],
            prefill_s=[
                (self.prefill_s(matched[i]) + self.loading_s(replica)) * self.slowness(replica)
                for i, replica in enumerate(replicas)
            ],
        )

    def table(
        self,
        replicas: list[ReplicaIndex],
        matched: list[int],
        *,
        load_s: list[float],
        prefill_s: list[float],
        eviction_s: list[float] | None = None,
    ) -> CostTable:
        """Do as `costs`, with the policy's own costs; M of Algorithm 2 if None. Lists are by position in `replicas`."""
        return CostTable(
            replicas,
            self._table.ids,
            matched,
            load_s=load_s,
            eviction_s=self._eviction_s(replicas, matched) if eviction_s is None else eviction_s,
            prefill_s=prefill_s,
            loaded=[self.loaded_tokens(replica) for replica in replicas] if self._cluster.tiers.places else None,
        )

    def _eviction_s(self, replicas: list[ReplicaIndex], matched: list[int]) -> list[float]:
        """M: seconds of recomputation to expect from what must be evicted to run the request on each replica."""
        num_tokens, outputs, capacity = self._num_tokens, self._window.mean_output_tokens, self._table.capacity
        caches = self._cluster.index.caches
        costs_s = [0.0] * len(replicas)
        for i, replica in enumerate(replicas):
            missed = num_tokens - matched[i] + self.loaded_tokens(replica)
            room = capacity[replica] - caches[replica].used_tokens - missed
            if outputs[replica] + 1.0 < room:
                continue
            excess = round(outputs[replica]) - room
            if excess > 0:
                evictions = self._cluster.eviction_costs[replica]
                costs_s[i] = evictions.cost_s(int(excess), self.num_window_requests[replica], self.match.path)
        return costs_s


class ReplicaView:
    """One replica that may get the request. Everything is computed when asked for."""

    __slots__ = ("_view", "index")

    def __init__(self, view: ClusterView, index: ReplicaIndex) -> None:
        self._view = view
        self.index = index

    @property
    def id(self) -> ReplicaId:
        return self._view.replica_id(self.index)

    @property
    def matched_tokens(self) -> int:
        """Leading prompt tokens that it would serve from its cache. O(depth)."""
        return self._view.matched_on(self.index)

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that it would have to compute. O(depth)."""
        return self._view.request.num_prompt_tokens - self.matched_tokens

    @property
    def prefill_s(self) -> float:
        """P: seconds to compute them."""
        return self._view.prefill_s(self.matched_tokens)

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return self._view.num_requests[self.index]

    @property
    def num_decoding(self) -> int:
        """Requests in flight that have their first token."""
        return self._view.num_decoding[self.index]

    @property
    def waiting_prefill_tokens(self) -> int:
        """Prompt tokens still to be computed for requests in flight without a first token."""
        return self._view.waiting_prefill_tokens[self.index]

    @property
    def waiting_prefill_s(self) -> float:
        """Seconds to compute them."""
        return self._view.waiting_prefill_s[self.index]

    @property
    def load_s(self) -> float:
        """L: seconds of work placed here in the window."""
        return self._view.load_s[self.index]

    @property
    def held_tokens(self) -> int:
        """KV tokens that it caches or is about to cache."""
        return self._view.held_tokens(self.index)

    @property
    def kv_usage(self) -> float:
        """Share of its KV cache that prompts in flight take; 0 where the size is unknown."""
        return self._view.kv_usage(self.index)
