"""What another gateway's placements count for, and for how long."""

from __future__ import annotations

from random import Random

from preble.core.placing.assumed import REMEMBERED_ENDS
from preble.core.types import PeerId, ReplicaId, Request, RequestId, pack_tokens
from preble.core.types.events import PeerHeld, PeerPlaced, PeerReported
from preble.core.types.life import Ended, FirstToken
from support.by_hand import A, B, scheduler_of

EAST = PeerId("east")
PROMPT = pack_tokens(Random(0).sample(range(30_000), 400))


def of(request_id: str, fact: PeerPlaced | FirstToken | Ended) -> PeerReported:
    return PeerReported(EAST, RequestId(request_id), fact)


def placed(request_id: str = "theirs", on: ReplicaId = A, *, known: bool = True) -> PeerReported:
    return of(request_id, PeerPlaced(on, 400, 0, PROMPT if known else None))


def test_a_prompt_that_another_gateway_has_just_placed_attracts_the_same_prompt() -> None:
    for where in (A, B):
        scheduler = scheduler_of("preble", A, B, reports_events=True)
        assert scheduler.assume(placed(on=where), 0.0)
        assert scheduler.place(Request(RequestId("ours"), PROMPT), 0.01).replica_id == where


def test_a_prompt_known_only_by_its_length_counts_as_load() -> None:
    scheduler = scheduler_of("preble", A, B, reports_events=True)
    assert scheduler.assume(placed(known=False), 0.0)
    state = scheduler.snapshot()
    assert state.replicas[A].waiting_prefill_tokens == 400
    assert state.num_index_tokens == 0
    assert scheduler.place(Request(RequestId("ours"), PROMPT), 0.01).replica_id == B


def test_theirs_are_counted_apart_from_ours() -> None:
    scheduler = scheduler_of("preble", A, B)
    scheduler.place(Request(RequestId("theirs"), PROMPT), 0.0)
    assert scheduler.assume(placed("theirs"), 0.0)
    assert (scheduler.snapshot().num_in_flight, scheduler.snapshot().num_assumed) == (1, 1)
    scheduler.on_finish(RequestId("theirs"), 1, 1.0)
    assert (scheduler.snapshot().num_in_flight, scheduler.snapshot().num_assumed) == (0, 1)


def test_the_first_token_ends_the_wait_and_the_end_ends_it_all() -> None:
    scheduler = scheduler_of("preble", A)
    scheduler.assume(placed(), 0.0)
    assert scheduler.assume(of("theirs", FirstToken()), 0.5)
    assert scheduler.snapshot().replicas[A].waiting_prefill_tokens == 0
    assert scheduler.assume(of("theirs", Ended(output_tokens=20)), 1.0)
    assert scheduler.snapshot().replicas[A].num_requests == 0
    scheduler.check()


def test_an_end_that_comes_first_keeps_its_placement_from_counting() -> None:
    scheduler = scheduler_of("preble", A)
    assert not scheduler.assume(of("theirs", Ended()), 0.0)
    assert not scheduler.assume(placed(), 0.1)
    assert scheduler.snapshot().num_assumed == 0


def test_only_so_many_ends_are_remembered() -> None:
    scheduler = scheduler_of("preble", A)
    for number in range(REMEMBERED_ENDS + 1):
        scheduler.assume(of(str(number), Ended()), 0.0)
    assert scheduler.assume(placed("0"), 0.1)
    assert not scheduler.assume(placed("1"), 0.1)


def test_a_replica_that_leaves_gives_back_our_requests_only() -> None:
    scheduler = scheduler_of("preble", A)
    scheduler.place(Request(RequestId("ours"), PROMPT), 0.0)
    scheduler.assume(placed(), 0.0)
    assert [request.request_id for request in scheduler.remove_replica(A, 1.0)] == ["ours"]
    assert not scheduler.assume(of("theirs", Ended(output_tokens=1)), 2.0)
    scheduler.check()


def test_a_gateway_that_is_gone_leaves_nothing_in_flight() -> None:
    scheduler = scheduler_of("preble", A, B)
    scheduler.assume(placed("1"), 0.0)
    scheduler.assume(placed("2", on=B), 0.0)
    assert scheduler.forget_peer(EAST, 1.0) == 2
    assert scheduler.forget_peer(EAST, 1.0) == 0
    assert scheduler.snapshot().num_assumed == 0
    assert all(not replica.num_requests for replica in scheduler.snapshot().replicas.values())
    scheduler.check()


def test_what_a_replica_without_kv_events_has_computed_for_another_gateway_counts_as_cached() -> None:
    for reports_events in (False, True):
        scheduler = scheduler_of("preble", A, B, reports_events=reports_events)
        assert scheduler.assume(PeerHeld(EAST, B, PROMPT), 0.0) is not reports_events
        placement = scheduler.place(Request(RequestId("ours"), PROMPT), 0.01)
        assert (placement.matched_tokens > 0) is not reports_events
        assert reports_events or placement.replica_id == B
        assert scheduler.snapshot().num_assumed == 0
        scheduler.check()
