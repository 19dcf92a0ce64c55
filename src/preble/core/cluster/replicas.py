"""The replicas of the cluster, and what is in flight on each right now."""

from __future__ import annotations

from math import inf
from typing import Final

from preble.core.cluster.load_window import WindowEntry
from preble.core.prefixes.radix_tree import Node
from preble.core.replica_index import ReplicaIndex, ReplicaSet, replicas_in
from preble.core.types import ReplicaId, ReplicaSpec, Request, Role
from preble.errors import NoReplicaError, prompt_too_long

NO_DECODE: Final = "only replicas with the role of prefill are available; none that decodes"
NO_PREFILL: Final = "only replicas with the role of decode are available; none that computes prompts"


def longest_prompt(spec: ReplicaSpec) -> float:
    """Return tokens of the longest prompt that a replica can take; infinity where it gives no limit.

    >>> longest_prompt(ReplicaSpec(ReplicaId("a"), kv_capacity_tokens=4096, max_prompt_tokens=8192))
    4096
    """
    limits = [limit for limit in (spec.max_prompt_tokens, spec.kv_capacity_tokens) if limit is not None]
    return min(limits, default=inf)


class InFlightTransfer:
    """A transfer to the replica of a request in flight, until its end is reported.

    `leaf`: the last node that is in use on the source for it. `matched_tokens`: leading prompt tokens that are cached
    once it is there. `missed_tokens`, `prefill_s`: of the prompt, if it fails. `leg`: what the source computes for it
    first, None for nothing. `undisturbed_tokens`: to send while both links send nothing else, 0 where they do, or where
    the source computes first.
    """

    __slots__ = ("leaf", "leg", "matched_tokens", "missed_tokens", "prefill_s", "source", "undisturbed_tokens")

    def __init__(
        self,
        source: ReplicaIndex,
        leaf: Node,
        matched_tokens: int,
        missed_tokens: int,
        prefill_s: float,
        leg: InFlightRequest | None = None,
        undisturbed_tokens: int = 0,
    ) -> None:
        self.source = source
        self.leaf = leaf
        self.matched_tokens = matched_tokens
        self.missed_tokens = missed_tokens
        self.prefill_s = prefill_s
        self.leg = leg
        self.undisturbed_tokens = undisturbed_tokens


class InFlightRequest:
    """One request between `place` and `on_finish`.

    `leaf`: the node at which its prompt ends, in use on the replica. `missed_tokens`: prompt tokens to compute there,
    as expected when it was placed; `expected_output_tokens`: the length of its answer, likewise. `confirmed_tokens`:
    matched tokens that had been computed by then, not only were to be; `confirmed_used_s`: when the least recently used
    of them had last been used. `is_assumed`: another gateway has placed it. `has_ended`: it is no longer in flight.
    `noted_tokens`, `noted_at`: how many output tokens of it `RunningAnswers` has noted, and when. `transfer`: what is
    on its way to its replica; `waited_for_transfer`: whether anything was. `predicted_ttft_s`, `predicted_tpot_s`: the
    times that were predicted when it was placed, 0 where they were not.

    What `TimingSamples` notes of it: `number`: requests placed on its replica so far, this one included. `undisturbed`:
    no other prompt was waiting when it was placed. `num_decoding`, `decoding_tokens`: others in decode then, and their
    prompts' tokens. `ttft_s`: None if it is no sample. `batch`, `batch_tokens`: sequences in decode when its first
    token came, this one included, and their prompts' tokens; None if no first token was reported. `prefills_s`: what
    all prefills on its replica had taken by then.
    """

    __slots__ = (
        "batch",
        "batch_tokens",
        "confirmed_tokens",
        "confirmed_used_s",
        "decoding_tokens",
        "expected_output_tokens",
        "first_token_at",
        "has_ended",
        "is_assumed",
        "leaf",
        "missed_tokens",
        "noted_at",
        "noted_tokens",
        "num_decoding",
        "number",
        "placed_at",
        "predicted_tpot_s",
        "predicted_ttft_s",
        "prefills_s",
        "replica",
        "request",
        "transfer",
        "ttft_s",
        "undisturbed",
        "waited_for_transfer",
        "window_entry",
    )

    def __init__(
        self, request: Request, replica: ReplicaIndex, now: float, leaf: Node, window_entry: WindowEntry, missed: int
    ) -> None:
        self.request = request
        self.replica = replica
        self.placed_at = now
        self.leaf = leaf
        self.window_entry = window_entry
        self.missed_tokens = missed
        self.expected_output_tokens = 0
        self.confirmed_tokens = 0
        self.confirmed_used_s = now
        self.first_token_at: float | None = None
        self.is_assumed = False
        self.has_ended = False
        self.noted_tokens = 0.0
        self.noted_at = 0.0
        self.predicted_ttft_s = 0.0
        self.predicted_tpot_s = 0.0
        self.number = 0
        self.undisturbed = False
        self.num_decoding = 0
        self.decoding_tokens = 0
        self.ttft_s: float | None = None
        self.batch: int | None = None
        self.batch_tokens = 0
        self.prefills_s = 0.0
        self.transfer: InFlightTransfer | None = None
        self.waited_for_transfer = False


class ReplicaTable:
    """Replicas by index, with counts of what is in flight on each.

    `num_requests`: placed and not finished. `waiting_prefill_tokens`, `waiting_prefill_s`: prompt tokens to compute of
    those without a first token, and the seconds that takes. `num_decoding`, `decoding_tokens`: those with one, and
    their prompts' tokens. `expected_output_tokens`: output tokens to expect of all of them together, whether or not
    some have come. `block_size`: tokens per KV block.
    `capacity`: KV tokens, infinity where unknown; `known_capacity`: of all replicas together, where known. Lists are by
    replica index. `live`, `live_replicas`: the indexes in use, as a set and ascending (a new list whenever a replica
    joins or leaves). `ids`: replica ids by index. `trusted`: the live replicas whose matches count; `untrusted_ids`:
    the others. `prefilling`, `decoding`: those with these fixed roles. `answering_alone`: those that need no pair.
    """

    def __init__(self) -> None:
        self.specs: dict[ReplicaIndex, ReplicaSpec] = {}
        self.live: ReplicaSet = 0
        self.trusted: ReplicaSet = 0
        self.untrusted_ids: tuple[ReplicaId, ...] = ()
        self.num_requests: list[int] = []
        self.waiting_prefill_tokens: list[int] = []
        self.waiting_prefill_s: list[float] = []
        self.num_decoding: list[int] = []
        self.decoding_tokens: list[int] = []
        self.expected_output_tokens: list[int] = []
        self.block_size: list[int] = []
        self.capacity: list[float] = []
        self.live_replicas: list[ReplicaIndex] = []
        self.ids: tuple[ReplicaId | None, ...] = ()
        self.known_capacity = 0.0
        self._index_of: dict[ReplicaId, ReplicaIndex] = {}
        self._reserved: set[ReplicaIndex] = set()
        self._shortest_limit: float = inf
        self._answering: ReplicaSet = 0
        self._of_model: dict[str, ReplicaSet] = {}
        self.prefilling: ReplicaSet = 0
        self.decoding: ReplicaSet = 0
        self.answering_alone: ReplicaSet = 0

    def __contains__(self, replica_id: ReplicaId) -> bool:
        return replica_id in self._index_of

    def replica(self, replica_id: ReplicaId) -> ReplicaIndex:
        return self._index_of[replica_id]

    def replica_id(self, replica: ReplicaIndex) -> ReplicaId:
        return self.specs[replica].replica_id

    def add(self, spec: ReplicaSpec) -> ReplicaIndex:
        """Add the replica at the lowest free index."""
        replica = self._free_index()
        self.specs[replica] = spec
        self.block_size[replica] = spec.block_size
        self.capacity[replica] = inf if spec.kv_capacity_tokens is None else float(spec.kv_capacity_tokens)
        self._index_of[spec.replica_id] = replica
        self.live |= 1 << replica
        self.trusted |= 1 << replica
        self._note_change()
        return replica

    def reserve(self) -> ReplicaIndex:
        """Keep the lowest free index for something that is no replica."""
        index = self._free_index()
        self._reserved.add(index)
        self._note_change()
        return index

    def give_back(self, index: ReplicaIndex) -> None:
        """Replicas may have a reserved index again."""
        self._reserved.remove(index)

    def _free_index(self) -> ReplicaIndex:
        """Return the lowest index that nobody has; the lists are long enough for it."""
        indexes = map(ReplicaIndex, range(len(self.num_requests) + 1))
        free = next(i for i in indexes if i not in self.specs and i not in self._reserved)
        if free == len(self.num_requests):
            for counts in (
                self.num_requests,
                self.waiting_prefill_tokens,
                self.num_decoding,
                self.decoding_tokens,
                self.expected_output_tokens,
            ):
                counts.append(0)
            self.waiting_prefill_s.append(0.0)
            self.block_size.append(1)
            self.capacity.append(inf)
        return free

    def remove(self, replica_id: ReplicaId) -> ReplicaIndex:
        replica = self._index_of.pop(replica_id)
        del self.specs[replica]
        self.live &= ~(1 << replica)
        self.trusted &= ~(1 << replica)
        self._note_change()
        self.num_requests[replica] = self.waiting_prefill_tokens[replica] = self.num_decoding[replica] = 0
        self.expected_output_tokens[replica] = self.decoding_tokens[replica] = 0
        self.waiting_prefill_s[replica] = 0.0
        self.block_size[replica] = 1
        return replica

    def set_trust(self, replica: ReplicaIndex, trusted: bool) -> None:
        """Let matches on a live replica count, or not. O(replicas)."""
        self.trusted = self.trusted | 1 << replica if trusted else self.trusted & ~(1 << replica)
        self._note_change()

    def trusts(self, replica: ReplicaIndex) -> bool:
        return bool(self.trusted >> replica & 1)

    def serving(self, model: str) -> ReplicaSet:
        """Return the replicas that answer for a base model; for all of them with "". O(1)."""
        return self._of_model.get(model, self._of_model.get("", 0)) if model else self._answering

    def longest_prompt(self, among: ReplicaSet) -> float:
        """Return tokens of the longest prompt that any of these replicas takes; infinity where one gives no limit."""
        return max((longest_prompt(self.specs[replica]) for replica in replicas_in(among)), default=0)

    def fitting(self, num_prompt_tokens: int) -> ReplicaSet:
        """Return the replicas that can hold a prompt of this length. O(1) unless it is too long for some."""
        if num_prompt_tokens <= self._shortest_limit:
            return self.live
        return sum(1 << replica for replica, spec in self.specs.items() if num_prompt_tokens <= longest_prompt(spec))

    def mask(self, replica_ids: frozenset[ReplicaId]) -> ReplicaSet:
        """Return those of them that are in the table."""
        return sum(1 << self._index_of[r] for r in replica_ids if r in self._index_of)

    def eligible(self, request: Request) -> ReplicaSet:
        """Return the replicas that may take a request. Raises: NoReplicaError. PromptTooLong."""
        if not self.live:
            raise NoReplicaError("no replica is available")
        serving = self.serving(request.model)
        if not serving:
            if self.prefilling & self._of(request.model):
                raise NoReplicaError(NO_DECODE)
            raise NoReplicaError(f"no replica that serves the model {request.model!r} is available")
        fitting = serving & self.fitting(request.num_prompt_tokens)
        if not fitting:
            raise prompt_too_long(request.num_prompt_tokens, self.longest_prompt(serving))
        eligible = fitting & ~self.mask(request.avoid) if request.avoid else fitting
        if not eligible:
            raise NoReplicaError("no other replica is available")
        return eligible

    def sources(self, request: Request) -> ReplicaSet:
        """Return the replicas with the role of prefill that may compute a request's prompt."""
        fitting = self.prefilling & self.fitting(request.num_prompt_tokens) & self._of(request.model)
        return fitting & ~self.mask(request.avoid)

    def _of(self, model: str) -> ReplicaSet:
        """Return all replicas of a base model, whatever their role; all of them for "". O(replicas)."""
        return sum(1 << replica for replica, spec in self.specs.items() if not model or spec.model in (model, ""))

    def _note_change(self) -> None:
        self.live_replicas = sorted(self.specs)
        ids = {replica: spec.replica_id for replica, spec in self.specs.items()}
        self.ids = tuple(ids.get(replica) for replica in map(ReplicaIndex, range(len(self.num_requests))))
        self.untrusted_ids = tuple(ids[replica] for replica in self.live_replicas if not self.trusted >> replica & 1)
        self._shortest_limit = min(map(longest_prompt, self.specs.values()), default=inf)
        self.known_capacity = float(sum(spec.kv_capacity_tokens or 0 for spec in self.specs.values()))
        self.prefilling = sum(1 << replica for replica, spec in self.specs.items() if spec.role is Role.PREFILL)
        self.decoding = sum(1 << replica for replica, spec in self.specs.items() if spec.role is Role.DECODE)
        self.answering_alone = sum(1 << replica for replica, spec in self.specs.items() if spec.answers_alone)
        self._answering = self.live & ~self.prefilling
        self._of_model = {spec.model: 0 for spec in self.specs.values()}
        for model in self._of_model:
            takes = [replica for replica, spec in self.specs.items() if spec.model in (model, "")]
            self._of_model[model] = sum(1 << replica for replica in takes) & self._answering

    def start(self, entry: InFlightRequest) -> None:
        # Here and below, compiled code adds numbers that it takes out of a list in a third of the time of `+=`.
        replica = entry.replica
        self.num_requests[replica] = self.num_requests[replica] + 1
        self.waiting_prefill_tokens[replica] = self.waiting_prefill_tokens[replica] + entry.missed_tokens
        self.waiting_prefill_s[replica] = self.waiting_prefill_s[replica] + entry.window_entry.prefill_s
        self.expected_output_tokens[replica] = self.expected_output_tokens[replica] + entry.expected_output_tokens

    def start_leg(self, leg: InFlightRequest) -> None:
        """A replica computes a prompt for another one. No answer of it will decode there."""
        self.waiting_prefill_tokens[leg.replica] += leg.missed_tokens
        self.waiting_prefill_s[leg.replica] += leg.window_entry.prefill_s

    def end_leg(self, leg: InFlightRequest) -> None:
        self._end_waiting(leg)

    def correct(self, entry: InFlightRequest, missed_tokens: int, prefill_s: float) -> None:
        """The replica must compute other tokens of a waiting request's prompt than expected, in `prefill_s`."""
        replica = entry.replica
        self.waiting_prefill_tokens[replica] += missed_tokens - entry.missed_tokens
        more_s = prefill_s - entry.window_entry.prefill_s
        self.waiting_prefill_s[replica] = max(self.waiting_prefill_s[replica] + more_s, 0.0)
        entry.missed_tokens = missed_tokens

    def start_decoding(self, entry: InFlightRequest) -> None:
        replica = entry.replica
        self._end_waiting(entry)
        self.num_decoding[replica] = self.num_decoding[replica] + 1
        self.decoding_tokens[replica] = self.decoding_tokens[replica] + entry.window_entry.num_prompt_tokens

    def expect(self, entry: InFlightRequest, output_tokens: int) -> None:
        """The answer to a request in flight is expected to be as long as this from now on."""
        replica, more = entry.replica, output_tokens - entry.expected_output_tokens
        self.expected_output_tokens[replica] = self.expected_output_tokens[replica] + more
        entry.expected_output_tokens = output_tokens

    def end(self, entry: InFlightRequest) -> None:
        replica = entry.replica
        self.num_requests[replica] = self.num_requests[replica] - 1
        self.expected_output_tokens[replica] = self.expected_output_tokens[replica] - entry.expected_output_tokens
        if entry.first_token_at is None:
            self._end_waiting(entry)
        else:
            self.num_decoding[replica] = self.num_decoding[replica] - 1
            self.decoding_tokens[replica] = self.decoding_tokens[replica] - entry.window_entry.num_prompt_tokens

    def _end_waiting(self, entry: InFlightRequest) -> None:
        replica = entry.replica
        left = self.waiting_prefill_tokens[replica] - entry.missed_tokens
        self.waiting_prefill_tokens[replica] = left
        left_s = self.waiting_prefill_s[replica] - entry.window_entry.prefill_s if left else 0.0
        self.waiting_prefill_s[replica] = max(left_s, 0.0)

    def check(self, entries: list[InFlightRequest], legs: list[InFlightRequest]) -> None:
        """Assert that the counts agree with the requests in flight, and with what is computed for others. For tests."""
        for replica in map(ReplicaIndex, range(len(self.num_requests))):
            mine = [entry for entry in entries if entry.replica == replica]
            decoding = [entry for entry in mine if entry.first_token_at is not None]
            waiting = [entry for entry in mine if entry.first_token_at is None]
            waiting += [leg for leg in legs if leg.replica == replica]
            assert not mine or replica in self.specs
            assert self.num_requests[replica] == len(mine)
            assert self.num_decoding[replica] == len(decoding)
            assert self.decoding_tokens[replica] == sum(entry.window_entry.num_prompt_tokens for entry in decoding)
            assert self.waiting_prefill_tokens[replica] == sum(entry.missed_tokens for entry in waiting)
            assert self.expected_output_tokens[replica] == sum(entry.expected_output_tokens for entry in mine)
            assert abs(self.waiting_prefill_s[replica] - sum(entry.window_entry.prefill_s for entry in waiting)) < 1e-6
        assert self.live == sum(1 << replica for replica in self.specs)
        assert not self.trusted & ~self.live
        untrusted = {self._index_of[replica_id] for replica_id in self.untrusted_ids}
        assert self.live & ~self.trusted == sum(1 << replica for replica in untrusted)
