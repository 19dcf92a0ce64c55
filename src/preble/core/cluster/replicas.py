"""The replicas of the cluster and what is in flight on each right now.

Every replica has a *slot*, a small integer: a bit in a mask, an index into arrays. A slot is used again after its
replica is gone.
"""

from __future__ import annotations

from math import inf

from preble.core.cluster.load_window import WindowEntry
from preble.core.prefixes.radix_tree import Node
from preble.core.types import ReplicaId, ReplicaSpec, Request


def longest_prompt(spec: ReplicaSpec) -> float:
    """Tokens of the longest prompt that a replica can take; infinity where it gives no limit.

    >>> longest_prompt(ReplicaSpec(ReplicaId("a"), kv_capacity_tokens=4096, max_prompt_tokens=8192))
    4096
    """
    limits = [limit for limit in (spec.max_prompt_tokens, spec.kv_capacity_tokens) if limit is not None]
    return min(limits, default=inf)


class Watch:
    """What `live_times` notes of one request. `number`: how many had been placed on its replica, itself included.

    `undisturbed`: no other prompt was waiting when it was placed. `ttft_s`: None if it is no sample. `num_decoding`:
    others in decode when it was placed. `batch`: sequences in decode when its first token came, itself included;
    `prefills_s`: what all prefills on its replica had taken by then. Both None if nobody told of its first token.
    """

    __slots__ = ("batch", "num_decoding", "number", "prefills_s", "ttft_s", "undisturbed")

    def __init__(self, number: int, num_decoding: int, undisturbed: bool) -> None:
        self.number = number
        self.num_decoding = num_decoding
        self.undisturbed = undisturbed
        self.ttft_s: float | None = None
        self.batch: int | None = None
        self.prefills_s = 0.0


class InFlightRequest:
    """One request between `place` and `on_finish`.

    `leaf`: the node at which its prompt ends, pinned on the replica. `missed_tokens`: prompt tokens to compute there,
    as believed when it was placed. `confirmed_tokens`: matched tokens that had been computed by then, not merely
    promised; `confirmed_used_s`: when the least recently used of them had last been used. `prefix`: where the prefix
    ends for whose sake the replica was chosen, None if there is none. `watch`: what the correction of the cost model
    notes of it, None where there is none.
    """

    __slots__ = (
        "confirmed_tokens",
        "confirmed_used_s",
        "entry",
        "first_token_at",
        "leaf",
        "missed_tokens",
        "placed_at",
        "prefix",
        "replica",
        "request",
        "watch",
    )

    def __init__(self, request: Request, replica: int, now: float, leaf: Node, entry: WindowEntry, missed: int) -> None:
        self.request = request
        self.replica = replica
        self.placed_at = now
        self.leaf = leaf
        self.entry = entry
        self.missed_tokens = missed
        self.confirmed_tokens = 0
        self.confirmed_used_s = now
        self.prefix: Node | None = None
        self.first_token_at: float | None = None
        self.watch: Watch | None = None


class ReplicaTable:
    """Replicas by slot, with counts of what is in flight on each.

    `num_requests`: placed and not finished. `waiting_prefill_tokens`, `waiting_prefill_s`: prompt tokens to compute of
    those without a first token, and the seconds that takes. `num_decoding`: those with one. `block_size`: tokens a KV
    block. `capacity`: KV tokens, infinity where unknown. Lists go by replica index. `live`, `live_replicas`: the
    indexes in use, as a mask and ascending (another list whenever one joins or leaves). `ids`: replica ids by index.
    `trusted`: mask of the live replicas whose matches count; `untrusted_ids`: the replicas in the others.
    """

    def __init__(self) -> None:
        self.specs: dict[int, ReplicaSpec] = {}
        self.live = 0
        self.trusted = 0
        self.untrusted_ids: tuple[ReplicaId, ...] = ()
        self.num_requests: list[int] = []
        self.waiting_prefill_tokens: list[int] = []
        self.waiting_prefill_s: list[float] = []
        self.num_decoding: list[int] = []
        self.block_size: list[int] = []
        self.capacity: list[float] = []
        self.live_replicas: list[int] = []
        self.ids: tuple[ReplicaId | None, ...] = ()
        self._slots: dict[ReplicaId, int] = {}
        self._shortest_limit: float = inf

    def __contains__(self, replica_id: ReplicaId) -> bool:
        return replica_id in self._slots

    def replica(self, replica_id: ReplicaId) -> int:
        return self._slots[replica_id]

    def replica_id(self, replica: int) -> ReplicaId:
        return self.specs[replica].replica_id

    def add(self, spec: ReplicaSpec) -> int:
        """Give the replica the lowest free slot."""
        replica = next(i for i in range(len(self.specs) + 1) if i not in self.specs)
        if replica == len(self.num_requests):
            for counts in (self.num_requests, self.waiting_prefill_tokens, self.num_decoding):
                counts.append(0)
            self.waiting_prefill_s.append(0.0)
            self.block_size.append(1)
            self.capacity.append(inf)
        self.specs[replica] = spec
        self.block_size[replica] = spec.block_size
        self.capacity[replica] = inf if spec.kv_capacity_tokens is None else float(spec.kv_capacity_tokens)
        self._slots[spec.replica_id] = replica
        self.live |= 1 << replica
        self.trusted |= 1 << replica
        self._note_change()
        return replica

    def remove(self, replica_id: ReplicaId) -> int:
        replica = self._slots.pop(replica_id)
        del self.specs[replica]
        self.live &= ~(1 << replica)
        self.trusted &= ~(1 << replica)
        self._note_change()
        self.num_requests[replica] = self.waiting_prefill_tokens[replica] = self.num_decoding[replica] = 0
        self.waiting_prefill_s[replica] = 0.0
        self.block_size[replica] = 1
        return replica

    def set_trust(self, replica: int, trusted: bool) -> None:
        """Whether matches on a live replica count. O(replicas)."""
        self.trusted = self.trusted | 1 << replica if trusted else self.trusted & ~(1 << replica)
        self._note_change()

    def trusts(self, replica: int) -> bool:
        return bool(self.trusted >> replica & 1)

    @property
    def longest_prompt(self) -> float:
        """Tokens of the longest prompt that any replica takes; infinity where one gives no limit."""
        return max(map(longest_prompt, self.specs.values()), default=0)

    def fitting(self, num_prompt_tokens: int) -> int:
        """The mask of replicas that can hold such a prompt. O(1) unless it is too long for some."""
        if num_prompt_tokens <= self._shortest_limit:
            return self.live
        return sum(1 << replica for replica, spec in self.specs.items() if num_prompt_tokens <= longest_prompt(spec))

    def mask(self, replica_ids: frozenset[ReplicaId]) -> int:
        """The slots of those that are in the fleet, as a mask."""
        return sum(1 << self._slots[r] for r in replica_ids if r in self._slots)

    def _note_change(self) -> None:
        self.live_replicas = sorted(self.specs)
        ids = {replica: spec.replica_id for replica, spec in self.specs.items()}
        self.ids = tuple(ids.get(replica) for replica in range(len(self.num_requests)))
        self.untrusted_ids = tuple(ids[replica] for replica in self.live_replicas if not self.trusted >> replica & 1)
        self._shortest_limit = min(map(longest_prompt, self.specs.values()), default=inf)

    def start(self, flight: InFlightRequest) -> None:
        self.num_requests[flight.replica] += 1
        self.waiting_prefill_tokens[flight.replica] += flight.missed_tokens
        self.waiting_prefill_s[flight.replica] += flight.entry.prefill_s

    def first_token(self, flight: InFlightRequest) -> None:
        self._end_waiting(flight)
        self.num_decoding[flight.replica] += 1

    def end(self, flight: InFlightRequest) -> None:
        self.num_requests[flight.replica] -= 1
        if flight.first_token_at is None:
            self._end_waiting(flight)
        else:
            self.num_decoding[flight.replica] -= 1

    def _end_waiting(self, flight: InFlightRequest) -> None:
        replica = flight.replica
        self.waiting_prefill_tokens[replica] -= flight.missed_tokens
        left_s = (
            self.waiting_prefill_s[replica] - flight.entry.prefill_s if self.waiting_prefill_tokens[replica] else 0.0
        )
        self.waiting_prefill_s[replica] = max(left_s, 0.0)

    def check(self, flights: list[InFlightRequest]) -> None:
        """The counts agree with the requests in flight. For tests."""
        for replica in range(len(self.num_requests)):
            mine = [flight for flight in flights if flight.replica == replica]
            waiting = [flight for flight in mine if flight.first_token_at is None]
            assert not mine or replica in self.specs
            assert self.num_requests[replica] == len(mine)
            assert self.num_decoding[replica] == len(mine) - len(waiting)
            assert self.waiting_prefill_tokens[replica] == sum(flight.missed_tokens for flight in waiting)
            assert abs(self.waiting_prefill_s[replica] - sum(flight.entry.prefill_s for flight in waiting)) < 1e-6
        assert self.live == sum(1 << replica for replica in self.specs)
        assert not self.trusted & ~self.live
        untrusted = {self._slots[replica_id] for replica_id in self.untrusted_ids}
        assert self.live & ~self.trusted == sum(1 << replica for replica in untrusted)
