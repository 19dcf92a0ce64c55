"""Copies of a prefix from one replica to another: when they are chosen, what they count for, and how they end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from preble.core.costs.model import CostModel, CostProfile
from preble.core.costs.refit import RefitSettings
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import (
    BlocksStored,
    Placement,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Transfer,
    Ways,
    pack_tokens,
)
from preble.core.types.events import Reported, SchedulerEvent
from preble.core.types.life import TRANSFER_FAILED, TRANSFERRED, Started
from preble.decisions.explain import explain
from preble.decisions.lines import placement_row
from preble.decisions.recent import PlacedAt, RecentDecisions
from preble.errors import ConfigError, UnknownRequest
from support.by_hand import A, B, C, D, run_of, scheduler_of

PROFILE = CostProfile(
    "unit",
    "made up",
    ((0, 0.0), (1000, 1.0)),
    0.0,
    0.0,
    0.0,
    0.0,
    100_000,
    kv_bytes_per_token=10,
    link_bytes_per_s=100_000.0,
    link_latency_s=0.01,
)
"""A token takes 1 ms to compute and 0.1 ms to copy; a copy takes 10 ms more."""

DOC = run_of(3, 1000)
BLOCK = 10
Q = RequestId("q")


def scheduler(*names: ReplicaId, profile: CostProfile = PROFILE, **spec: object) -> GlobalScheduler:
    known = {"block_size": BLOCK, "reports_events": True, "transfer_group": "all", **spec}
    return scheduler_of("preble", *(names or (A, B)), model=CostModel(profile), **known)


def cache(made: GlobalScheduler, replica_id: ReplicaId = A, tokens: int = 1000) -> None:
    """Let the replica report that it caches the document's first tokens."""
    hashes = tuple(range(tokens // BLOCK))
    assert made.on_stored(BlocksStored(replica_id, hashes, None, pack_tokens(DOC[:tokens]), BLOCK), 0.0)


def occupy(made: GlobalScheduler, replica_id: ReplicaId = A, others: frozenset[ReplicaId] = frozenset({B})) -> None:
    """Let five seconds of prefill wait on the replica."""
    made.place(Request(RequestId("busy"), pack_tokens(run_of(9, 5000)), avoid=others), 0.0)


def ask(made: GlobalScheduler, name: str = "q", **more: frozenset[ReplicaId]) -> Placement:
    """Place the document with ten tokens of its own."""
    placement = made.place(Request(RequestId(name), pack_tokens([*DOC, *range(10)]), 1, **more), 0.0)
    made.check()
    return placement


def busy_with_a_copy(**spec: object) -> tuple[GlobalScheduler, Placement]:
    made = scheduler(**spec)
    cache(made)
    occupy(made)
    return made, ask(made)


def waiting_s(made: GlobalScheduler, replica_id: ReplicaId) -> float:
    return made.snapshot().replicas[replica_id].waiting_prefill_s


def test_an_idle_replica_copies_what_a_busy_one_has() -> None:
    _, placement = busy_with_a_copy()
    assert placement.replica_id == B and placement.matched_tokens == 1000
    transfer = placement.transfer
    assert transfer is not None and transfer.seconds == pytest.approx(0.11)
    assert transfer == Transfer(A, 1000, transfer.seconds)
    assert placement.predicted_ttft_s == pytest.approx(0.11 + 0.01)


def test_replicas_of_no_group_copy_nothing() -> None:
    _, placement = busy_with_a_copy(transfer_group="")
    assert (placement.replica_id, placement.transfer, placement.matched_tokens) == (B, None, 0)


def test_replicas_of_two_groups_copy_nothing_from_each_other() -> None:
    made = scheduler(A)
    made.add_replica(ReplicaSpec(B, block_size=BLOCK, transfer_group="other"), 0.0)
    cache(made)
    occupy(made)
    assert ask(made).transfer is None


def test_a_link_on_which_a_copy_takes_longer_than_computing_is_never_used() -> None:
    made = scheduler(profile=replace(PROFILE, link_bytes_per_s=9_000.0))
    cache(made)
    occupy(made)
    assert ask(made).transfer is None


def test_nothing_is_copied_where_nobody_knows_how_long_it_takes() -> None:
    for unknown in ({"link_bytes_per_s": None}, {"kv_bytes_per_token": None}):
        made = scheduler(profile=replace(PROFILE, **unknown))  # type: ignore[arg-type]
        cache(made)
        occupy(made)
        assert ask(made).transfer is None


def test_what_is_only_about_to_be_computed_is_not_copied() -> None:
    made = scheduler()
    made.place(Request(RequestId("first"), pack_tokens(DOC), avoid=frozenset({B})), 0.0)
    assert ask(made, avoid=frozenset({A})).transfer is None


def test_only_the_missing_end_is_copied() -> None:
    made = scheduler()
    cache(made)
    cache(made, B, tokens=400)
    occupy(made)
    placement = ask(made)
    assert placement.transfer is not None
    assert (placement.replica_id, placement.matched_tokens, placement.transfer.tokens) == (B, 1000, 600)


def test_of_two_that_have_it_the_one_with_less_to_send_is_the_source() -> None:
    made = scheduler(A, B, C)
    made.add_replica(ReplicaSpec(D, block_size=BLOCK, transfer_group="all"), 0.0)
    cache(made, A)
    cache(made, B)
    placements = [ask(made, name, avoid=frozenset({A, B, C, D} - {name})) for name in (C, D)]
    assert [placement.transfer.source for placement in placements if placement.transfer] == [A, B]


def test_a_second_copy_waits_for_the_link() -> None:
    made = scheduler(A, B, C)
    cache(made)
    occupy(made, others=frozenset({B, C}))
    first, second = ask(made, "q1", avoid=frozenset({C})), ask(made, "q2", avoid=frozenset({A, B}))
    assert first.transfer is not None and second.transfer is not None
    assert (first.transfer.seconds, second.transfer.seconds) == (pytest.approx(0.11), pytest.approx(0.21))
    made.on_transferred(RequestId("q1"), 0.11)
    made.on_transferred(RequestId("q2"), 0.21)
    made.check()


def test_a_copy_is_no_work_of_the_replica() -> None:
    made, _ = busy_with_a_copy()
    assert waiting_s(made, B) == pytest.approx(0.01)
    made.on_transferred(Q, 0.11)
    assert waiting_s(made, B) == pytest.approx(0.01)


def test_what_is_copied_is_in_use_on_its_source_until_it_is_there() -> None:
    made, _ = busy_with_a_copy()
    assert made.snapshot().replicas[A].in_use_tokens == 5000 + 1000
    made.on_transferred(Q, 0.11)
    assert made.snapshot().replicas[A].in_use_tokens == 5000
    made.check()


def test_after_a_failed_copy_the_replica_computes_all_of_it() -> None:
    made, _ = busy_with_a_copy()
    made.on_transfer_failed(Q, 0.05)
    made.check()
    assert waiting_s(made, B) == pytest.approx(1.01)
    made.on_transfer_failed(Q, 0.05)
    assert waiting_s(made, B) == pytest.approx(1.01)
    made.on_first_token(Q, 1.1)
    made.on_finish(Q, 1, 1.2)
    made.check()
    assert waiting_s(made, B) == 0.0


def test_what_was_to_be_copied_is_in_use_for_as_long_as_its_source_keeps_it() -> None:
    made, _ = busy_with_a_copy()
    made.on_transfer_failed(Q, 0.05, kept_s=2.0)
    assert made.snapshot().replicas[A].in_use_tokens == 5000 + 1000
    made.on_timer(2.06)
    assert made.snapshot().replicas[A].in_use_tokens == 5000
    made.check()


def test_a_first_token_or_an_end_ends_a_copy_too() -> None:
    for report in (lambda made: made.on_first_token(Q, 1.0), lambda made: made.on_finish(Q, 0, 1.0)):
        made, _ = busy_with_a_copy()
        report(made)
        made.check()
        assert made.snapshot().replicas[A].in_use_tokens == 5000


def test_a_moved_request_waits_for_no_copy() -> None:
    made, _ = busy_with_a_copy()
    made.move(Q, A, 0.05)
    made.check()
    made.on_transferred(Q, 0.1)
    made.check()


def test_a_copy_fails_when_its_source_leaves() -> None:
    made, _ = busy_with_a_copy()
    made.remove_replica(A, 0.05)
    made.check()
    assert waiting_s(made, B) == pytest.approx(1.01)
    made.on_transferred(Q, 0.1)
    made.check()


def test_a_copy_ends_when_its_target_leaves() -> None:
    made, _ = busy_with_a_copy()
    assert [request.request_id for request in made.remove_replica(B, 0.05)] == [Q]
    made.check()
    assert made.snapshot().replicas[A].in_use_tokens == 5000


@pytest.mark.parametrize(("cached_elsewhere", "copies"), [(0, True), (7000, False)])
def test_a_copy_costs_what_it_evicts(cached_elsewhere: int, copies: bool) -> None:
    """The wait on A costs less than computing again what a full B must evict, and more than the copy, which evicts
    more than its own tokens.
    """
    made = scheduler(kv_capacity_tokens=10_000)
    cache(made)
    if cached_elsewhere:
        others = pack_tokens(run_of(6, cached_elsewhere))
        assert made.on_stored(BlocksStored(B, tuple(range(1000, 1700)), None, others, BLOCK), 0.0)
    made.place(Request(RequestId("busy"), pack_tokens(run_of(9, 200)), avoid=frozenset({B})), 0.0)
    made._cluster.recomputation.share = 0.5
    placement = ask(made)
    assert (placement.replica_id, placement.transfer is not None) == ((B, True) if copies else (A, False))


def test_a_replica_that_must_have_the_prefix_copies_it_whatever_is_evicted() -> None:
    made = scheduler(kv_capacity_tokens=10_000)
    cache(made)
    others = pack_tokens(run_of(6, 10_000))
    assert made.on_stored(BlocksStored(B, tuple(range(1000, 2000)), None, others, BLOCK), 0.0)
    made._cluster.recomputation.share = 0.5
    placement = ask(made, avoid=frozenset({A}))
    assert placement.transfer is not None
    assert (placement.replica_id, placement.transfer.source, placement.matched_tokens) == (B, A, 1000)
    (candidate,) = placement.candidates
    assert (candidate.copied_tokens, candidate.matched_tokens) == (1000, 1000)
    assert candidate.own_prefill_s == pytest.approx(0.01) and candidate.own_wait_s == pytest.approx(0.11)


def test_ends_of_copies_are_reported_to_listeners() -> None:
    heard: list[SchedulerEvent] = []

    class Listener:
        def on(self, event: SchedulerEvent, now: float) -> None:
            heard.append(event)

    made, _ = busy_with_a_copy()
    made.listen(Listener())
    made.on_transferred(Q, 0.1)
    made.on_transfer_failed(Q, 0.1)
    assert heard == [Reported(Q, TRANSFERRED), Reported(Q, TRANSFER_FAILED)]
    with pytest.raises(UnknownRequest):
        made.on_transferred(RequestId("nobody"), 0.1)


def test_explain_says_what_is_copied_from_where_and_how_it_ended() -> None:
    _, placement = busy_with_a_copy()
    recent = RecentDecisions("preble", 10)
    placed = PlacedAt(placement, 0.0)
    recent.on(placed, Started(), 0.0)
    recent.on(placed, TRANSFER_FAILED, 0.25)
    (decision,) = recent.of_request("q")
    text = " ".join(explain(decision).split())
    assert "1000 of the 1000 cached tokens are copied there from a first, in 0.110 s" in text
    assert "to copy" in text and "The copy had failed after 0.250 s." in text


@pytest.mark.parametrize("name", ["kv_bytes_per_token", "link_bytes_per_s", "link_latency_s"])
def test_a_profile_with_an_impossible_link_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="unit"):
        replace(PROFILE, **{name: -1})  # type: ignore[arg-type]


def test_a_replica_that_may_not_take_part_neither_sends_nor_gets_copies() -> None:
    for name in (A, B):
        made = scheduler()
        cache(made)
        occupy(made)
        made.allow_transfers(name, False, 0.0)
        assert ask(made).transfer is None
        made.on_finish(Q, 1, 0.0)
        made.allow_transfers(name, True, 0.0)
        made.check()


def test_what_is_under_way_ends_well_after_a_replica_may_not_take_part_any_more() -> None:
    made, placement = busy_with_a_copy()
    assert placement.transfer is not None
    made.allow_transfers(B, False, 0.0)
    made.on_transferred(Q, 0.1)
    made.check()
    made.remove_replica(B, 0.2)
    made.check()


def test_the_log_and_explain_say_what_each_way_would_have_cost_on_each_replica() -> None:
    _, placement = busy_with_a_copy()
    _, without = busy_with_a_copy(transfer_group="")
    on_a, on_b = placement.candidates
    assert on_a.ways == Ways(on_a.cost_s) and [c.cost_s for c in without.candidates] == pytest.approx(
        [c.ways.computed_s for c in placement.candidates if c.ways is not None]
    )
    assert on_b.ways is not None and on_b.ways.copied_s == on_b.cost_s < on_b.ways.computed_s
    assert placement_row(placement).ways == (on_a.ways, on_b.ways) and placement_row(without).ways == ()
    recent = RecentDecisions("preble", 10)
    for one in (placement, without):
        recent.on(PlacedAt(one, 0.0), Started(), 0.0)
    with_copy, alone = recent.of_request("q")
    costs = [f"{1000 * seconds:.1f}" for seconds in (on_b.ways.computed_s, on_b.cost_s, on_a.cost_s)]
    rows = [line.split() for line in explain(with_copy).splitlines()]
    table = rows[rows.index(["the", "sum,", "if", "it", "would", "compute", "copy", "(ms)"]) :]
    assert table[1:3] == [["*", "b", *costs[:2]], ["a", costs[2], "-"]]
    assert "if it would" not in explain(alone)


def test_a_copy_that_comes_later_than_computing_is_weighed_but_not_made() -> None:
    made = scheduler(profile=replace(PROFILE, link_bytes_per_s=9_000.0))
    cache(made)
    occupy(made)
    placement = ask(made)
    assert placement.transfer is None
    ways = placement.candidates[1].ways
    assert ways is not None and ways.copied_s is not None and ways.copied_s > 4.0


class Copying:
    """Replica A computes and sends; B gets a copy whenever it is asked, each `slowness` times as late as the profile
    says.
    """

    def __init__(self, slowness: float) -> None:
        settings = {"refit": RefitSettings(min_samples=4, interval_s=0.0, link_memory_s=60.0)}
        spec = {"block_size": BLOCK, "reports_events": True, "transfer_group": "all"}
        self.made = scheduler_of("preble", A, B, model=CostModel(PROFILE), settings=settings, **spec)
        self._slowness = slowness
        self.now = 0.0

    @property
    def factor(self) -> float:
        return self.made.snapshot().cost_factors.link

    def copy(self, number: int, *, beside: bool = False) -> None:
        """Copy one document; `beside`: while another one is copied."""
        ids = [RequestId(f"{number}-{i}") for i in range(1 + beside)]
        for i, request_id in enumerate(ids):
            tokens = run_of(100 + 10 * number + i, 1000)
            hashes = tuple(range((10 * number + i) * 1000, (10 * number + i) * 1000 + 1000 // BLOCK))
            assert self.made.on_stored(BlocksStored(A, hashes, None, pack_tokens(tokens), BLOCK), self.now)
            request = Request(request_id, pack_tokens([*tokens, *range(10)]), 1, avoid=frozenset({A}))
            placement = self.made.place(request, self.now)
            assert placement.transfer is not None
        self.now += 0.11 * self._slowness
        for request_id in ids[beside:]:
            self.made.on_transferred(request_id, self.now)
        for request_id in ids:
            self.made.on_finish(request_id, 1, self.now)
        self.tick()

    def tick(self) -> None:
        if (due := self.made.next_timer()) is not None and due <= self.now:
            self.made.on_timer(self.now)
        self.made.check()


def test_links_that_are_slower_than_the_profile_says_are_learned() -> None:
    cluster = Copying(2.0)
    for number in range(40):
        cluster.copy(number)
    assert cluster.factor == pytest.approx(2.0, rel=0.05)


def test_a_copy_beside_another_one_says_nothing_of_the_link() -> None:
    cluster = Copying(2.0)
    for number in range(20):
        cluster.copy(number, beside=True)
    assert cluster.factor == 1.0


def test_links_are_tried_again_once_nothing_was_copied_for_long() -> None:
    cluster = Copying(2.0)
    for number in range(40):
        cluster.copy(number)
    cluster.now += 61.0
    for i in range(4):  # other requests go on
        request = Request(RequestId(f"own-{i}"), pack_tokens(run_of(10_000 + i, 1000)), 1)
        cluster.made.place(request, cluster.now)
        cluster.now += 1.0
        cluster.made.on_first_token(request.request_id, cluster.now)
        cluster.now += 1.0
        cluster.made.on_finish(request.request_id, 2, cluster.now)
        cluster.tick()
    assert cluster.factor == 1.0
