"""A pair that one gateway makes is known to the others on both replicas."""

from __future__ import annotations

from functools import partial

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import PeerId, ReplicaId, ReplicaSpec, Request, RequestId, Role, pack_tokens
from preble.core.types.events import PeerPlaced, PeerReported
from preble.peers.member import GroupMember
from preble.peers.packets import Message, decode, encode
from support.by_hand import scheduler_of

P, D, Q = ReplicaId("p"), ReplicaId("d"), RequestId("q")


def test_the_prompt_of_a_pair_waits_at_its_source_for_peers_too_until_it_is_sent() -> None:
    members: dict[PeerId, GroupMember] = {}
    wire: list[tuple[PeerId, Message]] = []

    def deliver() -> None:
        while wire:
            sender, message = wire.pop(0)
            [message] = decode(encode(sender, 1, (message,))).messages
            for member in members.values():
                member.receive(sender, message, 0.0)

    schedulers: list[GlobalScheduler] = []
    for me in (PeerId("east"), PeerId("west")):
        scheduler = scheduler_of("preble")
        for replica, role in ((P, Role.PREFILL), (D, Role.DECODE)):
            scheduler.add_replica(ReplicaSpec(replica, 100_000, transfer_group="g", role=role), 0.0)

        def send(sender: PeerId, message: Message) -> None:
            wire.append((sender, message))

        members[me] = GroupMember(me, scheduler, partial(send, me))
        scheduler.listen(members[me])
        schedulers.append(scheduler)
    for member in members.values():
        member.tick(0.0)
    deliver()
    east, west = schedulers
    east.place(Request(Q, pack_tokens(range(400))), 0.0)
    deliver()
    rows = west.snapshot().replicas
    assert (rows[P].waiting_prefill_tokens, rows[D].waiting_prefill_tokens, rows[D].num_requests) == (400, 0, 1)
    east.on_transferred(Q, 0.1)
    deliver()
    assert west.snapshot().replicas[P].waiting_prefill_tokens == 0
    east.on_finish(Q, 3, 0.2)
    deliver()
    west.check()
    assert west.snapshot().num_assumed == 0


def test_what_a_replica_that_decodes_computes_alone_waits_there_for_peers_too() -> None:
    west = scheduler_of("preble")
    west.add_replica(ReplicaSpec(D, 100_000, role=Role.DECODE), 0.0)
    west.assume(PeerReported(PeerId("east"), Q, PeerPlaced(D, 400, prompt=pack_tokens(range(400)))), 0.0)
    west.check()
    assert west.snapshot().replicas[D].waiting_prefill_tokens == 400


def test_a_late_peer_hears_of_a_failed_split_no_more_that_its_prompt_is_cached() -> None:
    """Until then it was said to have what the other replica was to compute, or had cached."""
    members: dict[PeerId, GroupMember] = {}
    wire: list[tuple[PeerId, Message]] = []
    schedulers: dict[PeerId, GlobalScheduler] = {}
    for me in (PeerId("east"), PeerId("west")):
        schedulers[me] = scheduler = scheduler_of("preble")
        scheduler.add_replica(ReplicaSpec(P, 100_000, transfer_group="g", role=Role.PREFILL), 0.0)
        scheduler.add_replica(ReplicaSpec(D, 100_000, transfer_group="g", role=Role.DECODE, answers_alone=True), 0.0)

        def send(sender: PeerId, message: Message) -> None:
            wire.append((sender, message))

        members[me] = GroupMember(me, scheduler, partial(send, me))
        scheduler.listen(members[me])
    east, west = schedulers.values()
    for name in (RequestId("before"), Q):
        placement = east.place(Request(name, pack_tokens(range(400))), 0.0)
        if name != Q:
            east.on_transferred(name, 0.0)
            east.on_finish(name, 3, 0.0)
    assert placement.prefill_source == P and placement.matched_tokens > 300
    east.on_transfer_failed(Q, 0.1)
    for member in members.values():
        member.tick(0.2)
    while wire:
        sender, message = wire.pop(0)
        [message] = decode(encode(sender, 1, (message,))).messages
        for member in members.values():
            member.receive(sender, message, 0.2)
    west.check()
    rows = west.snapshot().replicas
    assert (rows[P].waiting_prefill_tokens, rows[D].waiting_prefill_tokens) == (0, 400)
