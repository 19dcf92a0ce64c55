"""Random sequences through the scheduler's door, every invariant checked after each step.

The replicas' real caches are modelled by the naive truth: the set of block-aligned prefixes that each one stores.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from preble.core.costs.model import CostModel, CostProfile
from preble.core.costs.refit import RefitSettings
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import make_policy, policy_names
from preble.core.types import (
    BlocksEvicted,
    BlocksStored,
    CacheCleared,
    PeerId,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    pack_tokens,
    unpack_tokens,
)
from preble.core.types.events import PeerHeld, PeerPlaced, PeerReported
from preble.core.types.life import Ended, FirstToken

PROFILE = CostProfile("unit", "made up", ((0, 0.0), (100, 0.1)), 0.0, 0.01, 0.001, 0.0, 64)
BLOCK = 3
PEERS = [PeerId("east"), PeerId("west")]
peer_requests = st.tuples(st.sampled_from(PEERS), st.integers(0, 5).map(lambda number: RequestId(f"p{number}")))
prompts = st.lists(st.integers(0, 1), min_size=0, max_size=14).map(tuple)


class SchedulerMachine(RuleBasedStateMachine):
    """`truth[replica]`: block-aligned prefixes in its cache; a prefix stands for its last block."""

    @initialize(
        policy=st.sampled_from(policy_names()),
        seed=st.integers(0, 3),
        budget=st.sampled_from([None, None, 2500, 6000]),
        refit=st.sampled_from([None, RefitSettings(interval_s=1.0, min_samples=1)]),
    )
    def start(self, policy: str, seed: int, budget: int | None, refit: RefitSettings | None) -> None:
        self.scheduler = GlobalScheduler(
            make_policy(policy),
            CostModel(PROFILE),
            seed=seed,
            window_s=20.0,
            report_grace_s=2.0,
            belief_ttl_s=30.0,
            index_budget_bytes=budget,
            refit=refit,
        )
        self.scheduler._cluster.index._trim_tokens = 2  # prompts here are too short for the default ever to matter
        self.begin(budget)

    def begin(self, budget: int | None) -> None:
        """Before anything has gone through the door."""
        self.budget = budget
        self.now = 0.0
        self.count = 0
        self.live: dict[str, Request] = {}
        self.where: dict[str, ReplicaId] = {}
        self.replicas: dict[ReplicaId, ReplicaSpec] = {}
        self.truth: dict[ReplicaId, set[tuple[int, ...]]] = {}
        self.untrusted: set[ReplicaId] = set()
        self.assumed: dict[tuple[PeerId, RequestId], ReplicaId] = {}
        self.over: set[tuple[PeerId, RequestId]] = set()
        for events in (True, True, False):
            self.join(events, 12)

    @rule(events=st.booleans(), capacity=st.sampled_from([12, 40, None]))
    @precondition(lambda self: len(self.replicas) < 5)
    def join(self, events: bool, capacity: int | None) -> None:
        replica_id = ReplicaId(f"r{self.count}")
        self.count += 1
        spec = ReplicaSpec(replica_id, capacity, 20, BLOCK, events)
        self.scheduler.add_replica(spec, self.now)
        self.replicas[replica_id] = spec
        self.truth[replica_id] = set()

    @rule(data=st.data())
    @precondition(lambda self: len(self.replicas) > 1)
    def leave(self, data: st.DataObject) -> None:
        replica_id = data.draw(st.sampled_from(sorted(self.replicas)))
        orphans = self.scheduler.remove_replica(replica_id, self.now)
        assert {r.request_id for r in orphans} == {r for r, where in self.where.items() if where == replica_id}
        for request in orphans:
            del self.live[request.request_id], self.where[request.request_id]
        self.assumed = {request: where for request, where in self.assumed.items() if where != replica_id}
        del self.replicas[replica_id], self.truth[replica_id]
        self.untrusted.discard(replica_id)

    @rule(data=st.data(), trusted=st.booleans())
    def trust(self, data: st.DataObject, trusted: bool) -> None:
        """Changes nothing of what is believed, only whether it counts."""
        replica_id = data.draw(st.sampled_from(sorted(self.replicas)))
        believed = (
            self.scheduler.snapshot().num_index_tokens,
            self.scheduler.snapshot().replicas[replica_id].cached_tokens,
        )
        self.scheduler.set_trust(replica_id, trusted, self.now)
        (self.untrusted.discard if trusted else self.untrusted.add)(replica_id)
        state = self.scheduler.snapshot().replicas[replica_id]
        assert (self.scheduler.snapshot().num_index_tokens, state.cached_tokens) == believed
        assert state.trusted == trusted

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 15.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(prompt=prompts, namespace=st.sampled_from(["", "", "salted"]), data=st.data())
    def place(self, prompt: tuple[int, ...], namespace: str, data: st.DataObject) -> None:
        fitting = {r for r, s in self.replicas.items() if len(prompt) <= min(20, s.kv_capacity_tokens or 20)}
        if not fitting:
            return
        avoid = frozenset(data.draw(st.sets(st.sampled_from(sorted(fitting)), max_size=len(fitting) - 1)))
        request = Request(RequestId(f"q{self.count}"), pack_tokens(prompt), None, namespace, avoid)
        self.count += 1
        placement = self.scheduler.place(request, self.now)
        assert placement.replica_id in fitting - avoid
        assert 0 <= placement.matched_tokens <= max(len(prompt) - 1, 0)
        if self.replicas[placement.replica_id].reports_events:  # of others, the block size is learned
            assert placement.matched_tokens % BLOCK == 0
        assert placement.replica_id in {candidate.replica_id for candidate in placement.candidates}
        assert all(min(c.load_s, c.eviction_s, c.prefill_s) >= 0 for c in placement.candidates)
        assert set(placement.untrusted) == self.untrusted
        assert not any(c.matched_tokens for c in placement.candidates if c.replica_id in self.untrusted)
        assert placement.replica_id not in self.untrusted or placement.matched_tokens == 0
        self.live[request.request_id] = request
        self.where[request.request_id] = placement.replica_id

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def first_token(self, data: st.DataObject) -> None:
        self.scheduler.on_first_token(RequestId(data.draw(st.sampled_from(sorted(self.live)))), self.now)

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def move(self, data: st.DataObject) -> None:
        request_id = RequestId(data.draw(st.sampled_from(sorted(self.live))))
        to = data.draw(st.sampled_from(sorted(self.replicas)))
        self.scheduler.move(request_id, to, self.now)
        self.where[request_id] = to

    @rule(data=st.data(), output=st.sampled_from([0, 1, 2, 3, 4, 20]), reported=st.none() | st.integers(0, 14))
    @precondition(lambda self: self.live)
    def finish(self, data: st.DataObject, output: int, reported: int | None) -> None:
        request_id = RequestId(data.draw(st.sampled_from(sorted(self.live))))
        replica_id = self.where[request_id]
        if reported is not None and self.replicas[replica_id].reports_events:
            # A replica whose events are complete never has more cached than it stored.
            prompt, stored = tuple(unpack_tokens(self.live[request_id].prompt)), self.truth[replica_id]
            reported = next((end for end in range(reported, 0, -1) if prompt[:end] in stored), 0)
        self.scheduler.on_finish(request_id, output, self.now, cached_tokens=reported)
        del self.live[request_id], self.where[request_id]

    @rule(
        request=peer_requests,
        to=st.integers(0, 6),
        prompt=prompts,
        is_known=st.booleans(),
        matched=st.none() | st.integers(-1, 20),
    )
    def peer_places(
        self, request: tuple[PeerId, RequestId], to: int, prompt: tuple[int, ...], is_known: bool, matched: int | None
    ) -> None:
        """Also twice, after the end, on a replica that is unknown here, or where no such prompt fits."""
        replica_id = ReplicaId(f"r{to}")
        tokens = pack_tokens(prompt) if is_known else None
        event = PeerReported(*request, PeerPlaced(replica_id, len(prompt), matched, tokens))
        is_new = request not in self.over and request not in self.assumed
        fits = replica_id in self.replicas and 0 < len(prompt) <= (self.replicas[replica_id].kv_capacity_tokens or 20)
        assert self.scheduler.assume(event, self.now) == (is_new and fits)
        if is_new and fits:
            self.assumed[request] = replica_id

    @rule(request=peer_requests)
    def peer_first_token(self, request: tuple[PeerId, RequestId]) -> None:
        assert self.scheduler.assume(PeerReported(*request, FirstToken()), self.now) == (request in self.assumed)

    @rule(request=peer_requests, output=st.sampled_from([0, 1, 20]))
    def peer_ends(self, request: tuple[PeerId, RequestId], output: int) -> None:
        """Also before the placement, which then does not count."""
        assert self.scheduler.assume(PeerReported(*request, Ended(output_tokens=output)), self.now) == (
            request in self.assumed
        )
        self.assumed.pop(request, None)
        self.over.add(request)

    @rule(peer=st.sampled_from(PEERS), to=st.integers(0, 6), prompt=prompts)
    def peer_tells_what_it_had_computed(self, peer: PeerId, to: int, prompt: tuple[int, ...]) -> None:
        replica_id = ReplicaId(f"r{to}")
        spec = self.replicas.get(replica_id)
        changed = self.scheduler.assume(PeerHeld(peer, replica_id, pack_tokens(prompt)), self.now)
        assert not changed or (spec is not None and not spec.reports_events)

    @rule(peer=st.sampled_from(PEERS))
    def peer_dies(self, peer: PeerId) -> None:
        mine = {request for request in self.assumed if request[0] == peer}
        assert self.scheduler.forget_peer(peer, self.now) == len(mine)
        for request in mine:
            del self.assumed[request]
        self.over = {request for request in self.over if request[0] != peer}

    @rule(data=st.data(), tokens=prompts)
    def store(self, data: st.DataObject, tokens: tuple[int, ...]) -> None:
        """A replica stores every whole block of a prompt, reported in one event from the first block that it lacks."""
        replica_id = self._reporting(data)
        blocks = [tokens[:end] for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        missing = [block for block in blocks if block not in self.truth.get(replica_id, set())]
        if replica_id is None or not missing:
            return
        capacity = self.replicas[replica_id].kv_capacity_tokens
        if capacity is not None and BLOCK * (len(self.truth[replica_id]) + len(missing)) > capacity:
            return  # an engine evicts first, and what it reports never exceeds its cache
        first = len(missing[0]) - BLOCK
        event = BlocksStored(
            replica_id,
            tuple(hash(block) for block in missing),
            hash(tokens[:first]) if first else None,
            pack_tokens(missing[-1][first:]),
            BLOCK,
        )
        assert self.scheduler.on_stored(event, self.now) or self.budget is not None
        self.truth[replica_id].update(missing)

    @rule(data=st.data(), count=st.integers(1, 4))
    def evict_leaves(self, data: st.DataObject, count: int) -> None:
        """A replica evicts one or more blocks, always a last one of some prompt, and reports it in one event."""
        replica_id = self._reporting(data)
        stored = self.truth.get(replica_id, set()) if replica_id else set()
        gone = []
        for _ in range(count):
            leaves = sorted(p for p in stored if not any(len(q) > len(p) and q[: len(p)] == p for q in stored))
            if leaves:
                gone.append(data.draw(st.sampled_from(leaves)))
                stored.discard(gone[-1])
        if gone and replica_id is not None:
            self.scheduler.on_evicted(BlocksEvicted(replica_id, tuple(map(hash, gone))), self.now)

    @rule(data=st.data(), is_past=st.booleans())
    def clear(self, data: st.DataObject, is_past: bool) -> None:
        replica_id = self._reporting(data)
        if replica_id is not None:
            self.scheduler.on_evicted(CacheCleared(replica_id, is_past), self.now)
            self.truth[replica_id].clear()

    @rule()
    def timer(self) -> None:
        due = self.scheduler.next_timer()
        if due is not None:
            self.now = max(self.now, due)
            self.scheduler.on_timer(self.now)
            following = self.scheduler.next_timer()
            assert following is None or following > self.now or self.live or self.assumed

    @rule(prompt=prompts)
    def index_agrees_with_the_engines(self, prompt: tuple[int, ...]) -> None:
        """With nothing promised any more, what is matched is exactly what is stored, to the block."""
        if self.live or self.assumed or self.budget is not None:
            return
        self.now += 3.0
        self.scheduler.on_timer(self.now)
        for replica_id, spec in self.replicas.items():
            if spec.reports_events:
                stored = self.truth[replica_id]
                ends = [0]
                while prompt[: ends[-1] + BLOCK] in stored and ends[-1] + BLOCK <= len(prompt) - 1:
                    ends.append(ends[-1] + BLOCK)
                probe = Request(RequestId("probe"), pack_tokens(prompt))
                assert self.scheduler.matched_tokens(replica_id, probe) == ends[-1]

    def _reporting(self, data: st.DataObject) -> ReplicaId | None:
        reporting = sorted(r for r, spec in self.replicas.items() if spec.reports_events)
        return data.draw(st.sampled_from(reporting)) if reporting else None

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            assert self.scheduler.snapshot().num_in_flight == len(self.live)
            assert self.scheduler.snapshot().num_assumed == len(self.assumed)
            assert self.budget is None or self.scheduler.snapshot().num_index_bytes <= self.budget

    def teardown(self) -> None:
        """Once everything has ended and time has passed, nothing of it is left."""
        if not hasattr(self, "scheduler"):
            return
        for request_id in list(self.live):
            self.scheduler.on_finish(RequestId(request_id), 1, self.now)
        for peer in PEERS:
            self.scheduler.forget_peer(peer, self.now)
        for replica_id in self.replicas:
            self.scheduler.on_evicted(CacheCleared(replica_id), self.now)
        self.scheduler.on_timer(self.now + 100.0)
        self.scheduler.check()
        assert self.scheduler.snapshot().num_index_tokens == 0


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestGlobalScheduler = SchedulerMachine.TestCase
