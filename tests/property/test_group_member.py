"""Gateways of a group, whatever their network does: once it works again, all know the same requests in flight."""

from __future__ import annotations

from functools import partial
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import PeerId, ReplicaId, ReplicaSpec, Request, RequestId, pack_tokens
from preble.peers.member import BEAT_S, SILENT_S, GroupMember
from preble.peers.packets import Message
from preble.peers.prompt_book import CHUNK_TOKENS
from support.by_hand import scheduler_of

REPLICAS = [ReplicaId("a"), ReplicaId("b")]


class GroupMachine(RuleBasedStateMachine):
    """`members`: by name, with their schedulers. `wire`: what is on its way, as (receiver, sender, message)."""

    @initialize(gateways=st.integers(2, 4), budget=st.sampled_from([2_000, 1 << 20]))
    def start(self, gateways: int, budget: int) -> None:
        self.now = 0.0
        self.count = 0
        self.budget = budget
        self.loss = 0.0
        self.rng = Random(0)
        self.members: dict[PeerId, tuple[GroupMember, GlobalScheduler]] = {}
        self.own: dict[PeerId, list[str]] = {}
        self.wire: list[tuple[PeerId, PeerId, Message]] = []
        for _ in range(gateways):
            self.join()
        for _ in range(2):
            self.beat(1)
            self.deliver(twice=False, shuffled=False)

    @rule()
    @precondition(lambda self: len(self.members) < 4)
    def join(self) -> None:
        me = PeerId(f"gateway-{self.count}")
        self.count += 1
        scheduler = scheduler_of("preble", *REPLICAS, reports_events=True)
        member = GroupMember(me, scheduler, partial(self.send, me), budget_bytes=self.budget)
        scheduler.listen(member)
        self.members[me] = member, scheduler
        self.own[me] = []

    @rule(data=st.data())
    @precondition(lambda self: len(self.members) > 1)
    def die(self, data: st.DataObject) -> None:
        me = data.draw(st.sampled_from(sorted(self.members)))
        del self.members[me], self.own[me]

    def send(self, sender: PeerId, message: Message) -> None:
        self.wire += [(to, sender, message) for to in self.members if to != sender and self.rng.random() >= self.loss]

    @rule(loss=st.sampled_from([0.0, 0.3, 1.0]))
    def set_loss(self, loss: float) -> None:
        """From now on; what is on its way arrives."""
        self.deliver(twice=False, shuffled=False)
        self.loss = loss

    @rule(twice=st.booleans(), shuffled=st.booleans())
    def deliver(self, twice: bool, shuffled: bool) -> None:
        waiting, self.wire = self.wire * (1 + twice), []
        if shuffled:
            self.rng.shuffle(waiting)
        for to, sender, message in waiting:
            if to in self.members:
                self.members[to][0].receive(sender, message, self.now)

    @rule(data=st.data(), head=st.integers(0, 2), tail=st.integers(0, 3))
    def place(self, data: st.DataObject, head: int, tail: int) -> None:
        me = data.draw(st.sampled_from(sorted(self.members)))
        tokens = [head] * (2 * CHUNK_TOKENS) + [tail] * (tail * CHUNK_TOKENS // 2 + 1)
        request_id = RequestId(f"q{self.count}")
        self.count += 1
        self.members[me][1].place(Request(request_id, pack_tokens(tokens)), self.now)
        self.own[me].append(request_id)

    @rule(data=st.data(), ends=st.booleans(), output=st.integers(0, 3))
    def go_on(self, data: st.DataObject, ends: bool, output: int) -> None:
        busy = sorted(me for me, own in self.own.items() if own)
        if not busy:
            return
        me = data.draw(st.sampled_from(busy))
        request_id = RequestId(data.draw(st.sampled_from(self.own[me])))
        if ends:
            self.own[me].remove(request_id)
            self.members[me][1].on_finish(request_id, output, self.now)
        else:
            self.members[me][1].on_first_token(request_id, self.now)

    @rule(data=st.data(), to=st.sampled_from(REPLICAS))
    def move(self, data: st.DataObject, to: ReplicaId) -> None:
        busy = sorted(me for me, own in self.own.items() if own)
        if busy:
            me = data.draw(st.sampled_from(busy))
            self.members[me][1].move(RequestId(data.draw(st.sampled_from(self.own[me]))), to, self.now)

    @rule(data=st.data(), replica=st.sampled_from(REPLICAS))
    def restart_a_replica(self, data: st.DataObject, replica: ReplicaId) -> None:
        """As one gateway sees it: perhaps only its own connection has failed."""
        me = data.draw(st.sampled_from(sorted(self.members)))
        scheduler = self.members[me][1]
        for orphan in scheduler.remove_replica(replica, self.now):
            self.own[me].remove(orphan.request_id)
        scheduler.add_replica(ReplicaSpec(replica, block_size=1, reports_events=True), self.now)

    @rule(beats=st.sampled_from([1, 1, 1, 7]))
    def beat(self, beats: int) -> None:
        """Seven beats that nobody hears are too many: then all are forgotten."""
        for _ in range(beats):
            self.now += BEAT_S
            for member, _ in list(self.members.values()):
                member.tick(self.now)

    @invariant()
    def everything_holds(self) -> None:
        for _, scheduler in getattr(self, "members", {}).values():
            scheduler.check()

    def teardown(self) -> None:
        """The network works again: after some beats each gateway counts what the others have in flight, and no more."""
        if not hasattr(self, "members"):
            return
        self.loss = 0.0
        for _ in range(round(SILENT_S / BEAT_S) + 3):
            self.beat(1)
            for _ in range(3):  # what is told, what is then asked for, and its answer
                self.deliver(twice=False, shuffled=False)
        for me, (member, scheduler) in self.members.items():
            others = self.members.keys() - {me}
            assert member.peers == others and member.is_warm
            assert scheduler.snapshot().num_assumed == sum(len(self.own[other]) for other in others)
            assert scheduler.snapshot().num_in_flight == len(self.own[me])


GroupMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestGroupMember = GroupMachine.TestCase
