"""What a placement policy is asked and answers: the cluster as one request finds it, and a choice.

What a view computes, it computes when asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from preble.core.cluster.links import PrefixCopy
from preble.core.cluster.state import ClusterState, loading_s
from preble.core.prefixes.history import PromptPiece
from preble.core.prefixes.matching import in_use_on, matched_on, matched_tokens, usable_tokens
from preble.core.prefixes.radix_tree import Match, expected_output_tokens
from preble.core.replica_index import ReplicaIndex, ReplicaSet, replicas_in
from preble.core.types import Candidate, Reason, ReplicaId, Request, Tier


class Choice:
    """A policy's decision. `candidates`: what it weighed, for logs and explanations. `copy`: one of those that
    `TransferOptions` gives, to be made to the replica first; None for none.
    """

    __slots__ = ("candidates", "copy", "reason", "replica")

    def __init__(
        self,
        replica: ReplicaIndex,
        reason: Reason,
        candidates: Sequence[Candidate] = (),
        copy: PrefixCopy | None = None,
    ) -> None:
        self.replica = replica
        self.reason = reason
        self.candidates = candidates
        self.copy = copy


class ClusterView:
    """The cluster as one request finds it, read-only.

    A policy may look at it in two ways. `candidates` has an object for each replica: easy to write. `replicas` are
    the same replicas as indexes, ascending, and the lists are by index: fast, for policies that weigh hundreds of
    replicas. Do not write to the lists; what they hold for other indexes means nothing.

    By replica: `replica_ids`, None at an unused index (a new tuple whenever a replica joins or leaves). Requests in
    flight: `num_requests`; `num_decoding`, those with a first token; `waiting_prefill_tokens`, prompt tokens still to
    be computed of those without; `waiting_prefill_s`, seconds of prefill that these take; `output_tokens_in_flight`,
    output tokens to expect, those that have come included. In the window: `num_window_requests`, requests placed,
    whether or not they have ended; `mean_output_tokens`.

    `cost_model`; `decode_pace`: how many times as long as it says decoding takes, compared with prefill, 1.0 if about
    right. `expected_output_tokens`: length of the answer to expect, from earlier answers to what this prompt begins
    with. `known_tokens`: leading prompt tokens in the trees, whether or not a replica caches them; never the last one.
    `requests_per_s`: mean rate in the window to all of `replicas`. `typical_prompt_tokens`: geometric mean of the
    prompts' lengths there, on any replica; 0 where there was none. `recomputed_share`: how likely what is evicted is to
    be computed again, between 0 and 1; see `Recomputation`. `has_slow_replicas`: whether any takes longer than a
    typical one. `has_tiers`: whether any has KV outside its engine's memory, which it would have to load. `has_copies`:
    whether any can copy KV from others; see `TransferOptions`.

    For policies that `watch`: `match`, where the prompt leads in the tree; `eligible`, the same replicas as a set, and
    `trusted`, those of them whose matches count; `now`; `cluster`, of which nothing may be changed.
    """

    __slots__ = (
        "_matched",
        "_matched_everywhere",
        "_matched_replica",
        "_num_tokens",
        "_prefill_s",
        "_prefill_tokens",
        "_slowness",
        "_table",
        "_window",
        "cluster",
        "cost_model",
        "decode_pace",
        "eligible",
        "expected_output_tokens",
        "has_copies",
        "has_slow_replicas",
        "has_tiers",
        "known_tokens",
        "match",
        "mean_output_tokens",
        "now",
        "num_decoding",
        "num_requests",
        "num_window_requests",
        "output_tokens_in_flight",
        "recomputed_share",
        "replica_ids",
        "replicas",
        "request",
        "requests_per_s",
        "trusted",
        "typical_prompt_tokens",
        "waiting_prefill_s",
        "waiting_prefill_tokens",
    )

    def __init__(self, request: Request, eligible: ReplicaSet, match: Match, cluster: ClusterState, now: float) -> None:
        table, window, speeds = cluster.replicas, cluster.window, cluster.speeds
        self.request, self.match, self.cluster, self.now = request, match, cluster, now
        self.replicas: list[ReplicaIndex] = table.live_replicas if eligible == table.live else replicas_in(eligible)
        self.eligible = eligible
        self.trusted = eligible & table.trusted
        self._table, self._window, self._slowness = table, window, speeds.slowness
        self._num_tokens = request.num_prompt_tokens
        self.replica_ids = table.ids
        self.num_requests, self.num_decoding = table.num_requests, table.num_decoding
        self.waiting_prefill_tokens = table.waiting_prefill_tokens
        self.waiting_prefill_s = table.waiting_prefill_s
        self.output_tokens_in_flight = table.expected_output_tokens
        self.has_slow_replicas = speeds.slowness is not None
        if self.has_slow_replicas:
            self.waiting_prefill_s = self._scaled(table.waiting_prefill_s)
        self.num_window_requests, self.mean_output_tokens = window.num_requests, window.mean_output_tokens
        self.cost_model, self.decode_pace = cluster.cost_model, speeds.decode_pace
        self.expected_output_tokens = expected_output_tokens(match.path, window.mean_answer_tokens)
        self.known_tokens = min(match.num_tokens, max(self._num_tokens - 1, 0))
        self.recomputed_share = cluster.recomputation.share
        is_whole = len(self.replicas) == len(table.live_replicas)
        placed = window.num_placed if is_whole else sum([window.num_requests[replica] for replica in self.replicas])
        self.requests_per_s = window.requests_per_s(now, placed)
        self.typical_prompt_tokens = window.typical_prompt_tokens
        self.has_tiers = bool(cluster.tiers.places)
        self.has_copies = bool(cluster.links.groups) and request.keeps_kv
        # The last answers of `matched_tokens`, `matched_on` and `prefill_s`; neighbours mostly ask alike.
        self._matched_everywhere: list[int] = []
        self._matched_replica, self._matched = -1, 0
        self._prefill_tokens, self._prefill_s = -1, 0.0

    @property
    def candidates(self) -> list[ReplicaView]:
        """The replicas that may get the request, as objects, in the order of `replicas`; a new list."""
        return [ReplicaView(self, replica) for replica in self.replicas]

    def replica_id(self, replica: ReplicaIndex) -> ReplicaId:
        return self._table.replica_id(replica)

    def slowness(self, replica: ReplicaIndex) -> float:
        """Return how many times as long as a typical replica this one takes for the same work."""
        return 1.0 if self._slowness is None else self._slowness[replica]

    @property
    def load_s(self) -> list[float]:
        """L: seconds of work placed in the window, on a slower replica so much more."""
        return self._scaled(self._window.load_s)

    def _scaled(self, seconds: list[float]) -> list[float]:
        if self._slowness is None:
            return seconds
        return [value * factor for value, factor in zip(seconds, self._slowness, strict=False)]

    @property
    def decode_load_s(self) -> list[float]:
        """The part of L that is decoding, in seconds."""
        return self._scaled(self._window.decode_load_s)

    def pieces(self, until: int, beyond: int = 0) -> list[PromptPiece]:
        """Return what the trees know of the prompt: the pieces that reach beyond token `beyond`, up to token `until`.

        O(depth).
        """
        found = []
        for node in self.match.path:
            start = node.end - node.num_tokens
            if start >= until:
                break
            if node.end <= beyond:
                continue
            holders = (node.full_holders & self._table.live).bit_count()
            found.append(PromptPiece(start, node.end, holders, node.history, self.now))
        return found

    def held_tokens(self, replica: ReplicaIndex) -> int:
        """Return the KV tokens that the replica caches or is about to cache."""
        return self.cluster.index.caches[replica].used_tokens

    def active_tokens(self, replica: ReplicaIndex) -> int:
        """Return the KV tokens of the prompts in flight on the replica and of this one; shared prefixes count once.
        O(depth).

        Output tokens do not count: their number is unknown. On a replica that reports KV events a finished prompt
        counts for another `report_grace_s`.
        """
        cache = self.cluster.index.caches[replica]
        return cache.in_use_tokens + self._num_tokens - in_use_on(self.match, cache)

    def has_room(self, replica: ReplicaIndex, missed_tokens: float) -> bool:
        """Return whether the replica can cache these tokens and evict nothing."""
        return self.cluster.index.caches[replica].used_tokens + missed_tokens <= self._table.capacity[replica]

    def kv_usage(self, replica: ReplicaIndex) -> float:
        """Return the share of the KV cache that prompts in flight take, each token once; 0 if its size is unknown."""
        return min(self.cluster.index.caches[replica].in_use_tokens / self._table.capacity[replica], 1.0)

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
            held, caches = 0, self.cluster.index.caches
            if self.trusted >> replica & 1:
                held = (
                    self.cluster.tiers.matched_on(replica, self.match, caches)
                    if self.has_tiers
                    else matched_on(self.match, caches[replica])
                )
            self._matched = usable_tokens(held, self._num_tokens, self._table.block_size[replica])
            self._matched_replica = replica
        return self._matched

    def loaded_tokens(self, replica: ReplicaIndex) -> int:
        """Return tokens of `matched_on` that the replica must load into its engine's memory first. O(depth)."""
        return sum([tokens for _, tokens in self._loads(replica)]) if self.has_tiers else 0

    def loading_s(self, replica: ReplicaIndex) -> float:
        """Return seconds that takes; no more than to compute them. O(depth)."""
        loads = self._loads(replica) if self.has_tiers else []
        return loading_s(loads, self.cost_model, self._num_tokens, self.matched_on(replica)) if loads else 0.0

    def _loads(self, replica: ReplicaIndex) -> list[tuple[Tier, int]]:
        if not self.trusted >> replica & 1:
            return []
        size = self._table.block_size[replica]
        return self.cluster.tiers.loads(replica, self.match, self._num_tokens, size, self.cluster.index.caches)

    def prefill_s(self, matched_tokens: int) -> float:
        """P: seconds to compute the prompt where `matched_tokens` of it are cached."""
        if matched_tokens != self._prefill_tokens:
            self._prefill_tokens = matched_tokens
            self._prefill_s = self.cluster.cost_model.prefill_s(self._num_tokens - matched_tokens, matched_tokens)
        return self._prefill_s

    def own_prefill_s(self, replica: ReplicaIndex) -> float:
        """Return seconds to load and compute the request's prompt, on a replica of typical speed. O(depth)."""
        computing_s = self.prefill_s(self.matched_on(replica))
        return computing_s + self.loading_s(replica) if self.has_tiers else computing_s

    def ttft_s(self, replica: ReplicaIndex, own_s: float | None = None) -> float:
        """Return seconds to the request's first token: what waits there, then its own prompt, at the replica's speed.

        `own_s`: what `own_prefill_s` gives, if that is known. O(depth).
        """
        own_s = self.own_prefill_s(replica) if own_s is None else own_s
        seconds = self._table.waiting_prefill_s[replica] + own_s
        return seconds if self._slowness is None else seconds * self._slowness[replica]

    def tpot_s(self, replica: ReplicaIndex, *, alone: bool = False) -> float:
        """Return seconds between two tokens once the request and all that are in flight there decode together; `alone`:
        if nothing were in flight.
        """
        prompts_tokens, together = self._num_tokens, 1
        if not alone:
            prompts_tokens += self._table.decoding_tokens[replica] + self._table.waiting_prefill_tokens[replica]
            together += self._table.num_requests[replica]
        seconds = self.cost_model.decode_iteration_s(together, prompts_tokens) * self.decode_pace
        return seconds if self._slowness is None else seconds * self._slowness[replica]

    def matched_tokens(self, replicas: Sequence[ReplicaIndex]) -> list[int]:
        """Do as `matched_on`, for each of several replicas. O(replicas + depth)."""
        sizes, index = self._table.block_size, self.cluster.index
        if len(replicas) <= 2 and not self.has_tiers:
            few: list[int] = []
            for replica in replicas:
                tokens = matched_on(self.match, index.caches[replica]) if self.trusted >> replica & 1 else 0
                few.append(usable_tokens(tokens, self._num_tokens, sizes[replica]))
            if len(replicas) == len(self.replicas):
                self._matched_everywhere = [0] * len(sizes)
                for replica, tokens in zip(replicas, few, strict=True):
                    self._matched_everywhere[replica] = tokens
            return few
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
        if self.has_tiers:
            for replica in replicas:
                held[replica] = self.matched_on(replica)
        if len(replicas) == len(self.replicas):
            self._matched_everywhere = held
        if replicas is self.replicas and len(replicas) == len(held):
            return held
        return [held[replica] for replica in replicas]


class ReplicaView:
    """One replica that may get the request. Everything is computed when asked for."""

    __slots__ = ("_view", "index")

    def __init__(self, view: ClusterView, index: ReplicaIndex) -> None:
        self._view = view
        self.index = index

    def __repr__(self) -> str:
        return f"ReplicaView({self.id!r})"

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
