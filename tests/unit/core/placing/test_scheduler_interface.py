"""What `GlobalScheduler` promises to those who listen to it and those who read it, whatever the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from preble.core.placing.cache_tracker import CacheTracker
from preble.core.placing.scheduler import GlobalScheduler
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
)
from preble.core.types.events import (
    NotPlaced,
    PeerForgotten,
    PeerReported,
    ReplicaAdded,
    ReplicaRemoved,
    Reported,
    RequestPlaced,
    SchedulerEvent,
    Stored,
    TimerEvent,
    TransfersAllowed,
    TrustChanged,
)
from preble.core.types.life import Ended, FirstToken, Moved
from preble.errors import NoReplicaError, UnknownRequest
from support.by_hand import A, B, scheduler_of


class Notes:
    """A listener that notes each event and its time."""

    def __init__(self) -> None:
        self.calls: list[tuple[SchedulerEvent, float]] = []

    def on(self, event: SchedulerEvent, now: float) -> None:
        self.calls.append((event, now))


def listened_to() -> tuple[GlobalScheduler, Notes]:
    made, notes = scheduler_of("e2", A, B, reports_events=True), Notes()
    made.listen(notes)
    return made, notes


def test_each_call_that_changes_the_scheduler_is_reported_once_in_order() -> None:
    made, notes = listened_to()
    first, second = Request.of("first", [1, 2, 3]), Request.of("second", [4, 5])
    placement = made.place(first, 1.0)
    other = B if placement.replica_id == A else A
    made.move(RequestId("first"), other, 1.5)
    made.on_first_token(RequestId("first"), 2.0)
    stored = BlocksStored(other, (7,), None, pack_tokens([1]), 1)
    made.on_stored(stored, 2.5)
    evicted = BlocksEvicted(other, (7,))
    made.on_evicted(evicted, 3.0)
    made.on_finish(RequestId("first"), 4, 3.5, cached_tokens=1)
    made.set_trust(A, False, 4.0)
    made.allow_transfers(A, False, 4.0)
    unknown = PeerReported(PeerId("east"), RequestId("theirs"), FirstToken())
    made.assume(unknown, 4.5)
    made.forget_peer(PeerId("east"), 4.5)
    made.on_timer(5.0)
    made.remove_replica(A, 6.0)
    made.remove_replica(B, 6.0)
    with pytest.raises(NoReplicaError) as nobody:
        made.place(second, 7.0)
    spec = ReplicaSpec(ReplicaId("c"))
    made.add_replica(spec, 8.0)
    made.on_evicted(CacheCleared(ReplicaId("c")), 9.0)
    assert notes.calls == [
        (RequestPlaced(first, placement), 1.0),
        (Reported(first.request_id, Moved(other)), 1.5),
        (Reported(first.request_id, FirstToken()), 2.0),
        (Stored(stored, True), 2.5),
        (evicted, 3.0),
        (Reported(first.request_id, Ended(output_tokens=4, cached_tokens=1)), 3.5),
        (TrustChanged(A, False), 4.0),
        (TransfersAllowed(A, False), 4.0),
        (unknown, 4.5),
        (PeerForgotten(PeerId("east")), 4.5),
        (TimerEvent(), 5.0),
        (ReplicaRemoved(A), 6.0),
        (ReplicaRemoved(B), 6.0),
        (NotPlaced(second, nobody.value), 7.0),
        (ReplicaAdded(spec), 8.0),
        (CacheCleared(ReplicaId("c")), 9.0),
    ]
    kinds = {type(event) for event, _ in notes.calls}
    assert kinds <= set(get_args(SchedulerEvent)) and len(kinds) == 13


@pytest.mark.parametrize(
    "mistake",
    [
        lambda made: made.on_finish(RequestId("unknown"), 1, 1.0),
        lambda made: made.on_first_token(RequestId("unknown"), 1.0),
        lambda made: made.move(RequestId("unknown"), A, 1.0),
        lambda made: made.remove_replica(ReplicaId("unknown"), 1.0),
        lambda made: made.set_trust(ReplicaId("unknown"), True, 1.0),
        lambda made: made.allow_transfers(ReplicaId("unknown"), True, 1.0),
        lambda made: made.add_replica(ReplicaSpec(A), 1.0),
    ],
)
def test_a_mistaken_call_changes_nothing_and_is_not_reported(mistake: Callable[[GlobalScheduler], Any]) -> None:
    made, notes = listened_to()
    before = made.snapshot()
    with pytest.raises((UnknownRequest, NoReplicaError, ValueError)):
        mistake(made)
    assert notes.calls == [] and made.snapshot() == before


def test_a_snapshot_does_not_change_afterwards() -> None:
    made = scheduler_of("e2", A)
    before = made.snapshot()
    made.place(Request.of("r", [1, 2, 3]), 0.0)
    made.on_finish(RequestId("r"), 1, 1.0, cached_tokens=3)
    after = made.snapshot()
    assert (before.replicas[A].drift.num_requests, after.replicas[A].drift.num_requests) == (0, 1)
    assert (before.replicas[A].cached_tokens, after.replicas[A].cached_tokens) == (0, 3)


@pytest.mark.plain
def test_a_request_is_out_of_flight_though_nothing_can_be_learned_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = scheduler_of("e2", A, B)
    made.place(Request.of("r", [1, 2, 3]), 1.0)

    def fail(*args: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(CacheTracker, "compare", fail)
        with pytest.raises(ZeroDivisionError):
            made.on_finish(RequestId("r"), 4, 2.0, cached_tokens=1)
    assert sum(replica.num_requests for replica in made.snapshot().replicas.values()) == 0
    made.check()


@pytest.mark.parametrize("policy", ["preble", "round_robin"])
def test_the_first_token_is_predicted_after_what_waits_and_the_own_prefill(policy: str) -> None:
    made = scheduler_of(policy, A)
    cost = made.cost_model
    first = made.place(Request.of("first", range(100)), 1.0)
    second = made.place(Request.of("second", range(200, 250)), 1.0)
    third_s = cost.prefill_s(40)
    assert first.predicted_ttft_s == pytest.approx(cost.prefill_s(100))
    assert second.predicted_ttft_s == pytest.approx(cost.prefill_s(100) + cost.prefill_s(50))
    for request in (first, second):
        made.on_first_token(request.request_id, 2.0)
    assert made.place(Request.of("third", range(300, 340)), 3.0).predicted_ttft_s == pytest.approx(third_s)
