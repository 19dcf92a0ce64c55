"""Splits: one replica computes a prompt and another one decodes its answer. When, what they count for, how they end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from preble.core.costs.model import CostModel, CostProfile
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import (
    LONGEST_KV_LEASE_S,
    BlocksStored,
    CacheCleared,
    PeerId,
    Placement,
    ReplicaId,
    Request,
    RequestId,
    Transfer,
    TransferKind,
    pack_tokens,
)
from preble.core.types.events import PeerPlaced, PeerReported
from preble.core.types.life import LONGEST_S, TRANSFER_FAILED, Started
from preble.decisions.explain import explain
from preble.decisions.recent import PlacedAt, RecentDecisions
from support.by_hand import A, B, C, run_of, scheduler_of

PROFILE = CostProfile(
    "unit",
    "made up",
    ((0, 0.0), (1000, 1.0)),
    0.0,
    0.02,
    0.001,
    0.0,
    100_000,
    kv_bytes_per_token=10,
    link_bytes_per_s=100_000.0,
    link_latency_s=0.01,
)
"""A token takes 1 ms to compute and 0.1 ms to send; a transfer takes 10 ms more. An iteration of decodes takes 20 ms,
and 1 ms for each.
"""

DOC = run_of(3, 1000)
BLOCK = 10
Q = RequestId("q")


def with_roles(*names: ReplicaId, profile: CostProfile = PROFILE, **spec: object) -> GlobalScheduler:
    """A has computed prompts lately and decodes nothing, B decodes ten answers."""
    known = {"block_size": BLOCK, "reports_events": True, "transfer_group": "all", "splits": True, **spec}
    made = scheduler_of("preble", *(names or (A, B)), model=CostModel(profile), **known)
    others = frozenset(names or (A, B))
    for i in range(10):
        decodes = RequestId(f"decodes-{i}")
        made.place(Request(decodes, pack_tokens(run_of(10 + i, 20)), avoid=others - {B}), 0.0)
        made.on_first_token(decodes, 0.0)
    for i in range(3):
        short = RequestId(f"short-{i}")
        made.place(Request(short, pack_tokens(run_of(50 + i, 5000)), avoid=others - {A}), 0.0)
        made.on_finish(short, 200, 0.0)
    return made


def ask(made: GlobalScheduler, now: float = 0.0, **more: Any) -> Placement:
    placement = made.place(Request(Q, pack_tokens(DOC), **more), now)
    made.check()
    return placement


def split(**spec: object) -> tuple[GlobalScheduler, Placement]:
    made = with_roles(**spec)  # type: ignore[arg-type]
    placement = ask(made)
    assert placement.transfer is not None
    return made, placement


def waiting_s(made: GlobalScheduler, replica_id: ReplicaId) -> float:
    return made.snapshot().replicas[replica_id].waiting_prefill_s


def in_use(made: GlobalScheduler, replica_id: ReplicaId) -> int:
    return made.snapshot().replicas[replica_id].in_use_tokens


def test_one_that_decodes_nothing_computes_the_prompt_for_one_that_computes_none() -> None:
    _, placement = split()
    assert placement.replica_id == B and placement.matched_tokens == 0, "what A has"
    transfer = placement.transfer
    assert transfer is not None and transfer.seconds == pytest.approx(1.0 + 0.099 + 0.01)
    assert transfer == Transfer(A, 990, transfer.seconds, TransferKind.PREFILL)
    assert placement.predicted_ttft_s == pytest.approx(1.0 + 0.109 + 0.01)


@pytest.mark.parametrize("spec", [{"splits": False}, {"transfer_group": ""}])
def test_nobody_splits_who_may_not(spec: dict[str, object]) -> None:
    placement = ask(with_roles(**spec))  # type: ignore[arg-type]
    assert (placement.replica_id, placement.transfer) == (A, None)


def test_a_request_that_cannot_be_split_is_placed_as_where_nobody_splits() -> None:
    placement = ask(with_roles(), splits=False)
    assert (placement.replica_id, placement.transfer) == (A, None)


def test_nothing_is_weighed_where_nobody_may_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preble.core.policies.preble.Splits", None)  # shipped: the class, which then could not be made
    assert ask(with_roles(splits=False)).transfer is None


def test_a_split_request_is_one_use_of_its_prefix() -> None:
    made, _ = split()
    made.on_transferred(Q, 1.2)
    made.on_first_token(Q, 1.3)
    (entry,) = [one for one in made._in_flight.entries.values() if one.request.request_id == Q]
    assert entry.leaf.history is None, "somebody else has begun with it"


def test_a_slow_link_is_not_used() -> None:
    assert ask(with_roles(profile=replace(PROFILE, link_bytes_per_s=1_000.0))).transfer is None


@pytest.mark.parametrize(("bytes_per_s", "splits"), [(20_000.0, True), (5_000.0, False)])
def test_over_a_link_slower_than_computing_roles_alone_do_not_pay(bytes_per_s: float, splits: bool) -> None:
    """Sending takes twice as long as computing there: what prompts and answers do to each other counts once."""
    assert (ask(with_roles(profile=replace(PROFILE, link_bytes_per_s=bytes_per_s))).transfer is not None) is splits


def test_nothing_is_split_where_nobody_knows_how_long_it_takes_to_send() -> None:
    assert ask(with_roles(profile=replace(PROFILE, link_bytes_per_s=None))).transfer is None


def test_nothing_is_split_once_nobody_has_computed_prompts_for_long() -> None:
    placement = ask(with_roles(), now=120.0)
    assert (placement.replica_id, placement.transfer) == (A, None)


def test_what_is_cached_is_copied_and_not_computed_for_a_split() -> None:
    made = with_roles()
    assert made.on_stored(BlocksStored(B, tuple(range(99)), None, pack_tokens(DOC[:990]), BLOCK), 0.0)
    transfer = ask(made).transfer
    assert transfer is not None and transfer.kind is TransferKind.COPY


def test_only_what_the_target_lacks_is_sent() -> None:
    made = with_roles()
    assert made.on_stored(BlocksStored(B, tuple(range(20)), None, pack_tokens(DOC[:200]), BLOCK), 0.0)
    transfer = ask(made).transfer
    assert transfer is not None and (transfer.source, transfer.tokens) == (A, 790)


def test_the_source_computes_only_what_it_lacks() -> None:
    made = with_roles()
    assert made.on_stored(BlocksStored(A, tuple(range(40)), None, pack_tokens(DOC[:400]), BLOCK), 0.0)
    placement = ask(made)
    transfer = placement.transfer
    assert transfer is not None and (transfer.tokens, placement.matched_tokens) == (990, 400)
    assert waiting_s(made, A) == pytest.approx(0.6)


def test_the_source_must_be_a_replica_that_may_take_the_request() -> None:
    assert ask(with_roles(), avoid=frozenset({A})).transfer is None
    made = with_roles()
    made.allow_transfers(A, False, 0.0)
    assert ask(made).transfer is None


def test_the_prompt_waits_on_the_source_and_the_answer_counts_on_the_target() -> None:
    made, _ = split()
    assert waiting_s(made, A) == pytest.approx(1.0) and waiting_s(made, B) == pytest.approx(0.01)
    state = made.snapshot()
    assert (state.replicas[A].num_requests, state.replicas[B].num_requests) == (0, 11)
    assert state.num_in_flight == 11


def test_the_source_keeps_the_prompt_until_it_is_taken() -> None:
    made, _ = split(reports_events=False)
    assert in_use(made, A) == 1000
    made.on_transferred(Q, 1.1)
    made.check()
    assert in_use(made, A) == 0 and waiting_s(made, A) == 0.0
    assert made.matched_tokens(A, Request(RequestId("next"), pack_tokens(DOC))) == 990


def test_after_a_failed_split_the_target_computes_the_prompt() -> None:
    made, _ = split(reports_events=False)
    made.on_transfer_failed(Q, 0.05)
    made.check()
    assert waiting_s(made, A) == 0.0 and waiting_s(made, B) == pytest.approx(1.0)
    assert in_use(made, A) == 0


@pytest.mark.parametrize("reports_events", [False, True])
def test_what_nobody_fetches_is_in_use_on_its_source_until_the_lease_ends(reports_events: bool) -> None:
    made, _ = split(reports_events=reports_events)
    made.on_timer(1.1)
    made.on_transfer_failed(Q, 1.1, kept_s=20.0)
    made.on_finish(Q, 0, 1.1)
    made.check()
    assert in_use(made, A) == 1000 and waiting_s(made, A) == 0.0, "it is computed, and takes room"
    assert in_use(made, B) == 10 * 20, "the other one is not asked any more"
    assert made.next_timer() is not None
    made.on_timer(21.0)
    assert in_use(made, A) == 1000
    made.on_timer(21.2)
    made.check()
    assert in_use(made, A) == 0


def test_whoever_says_that_a_prompt_is_kept_for_years_holds_nothing_for_so_long() -> None:
    """A carrier or a peer may say so."""
    for kept_s in (LONGEST_S, inf, nan):
        made, _ = split()
        made.on_transfer_failed(Q, 1.1, kept_s=kept_s)
        made.on_finish(Q, 0, 1.1)
        made.on_timer(1.2 + LONGEST_KV_LEASE_S)
        made.check()
        assert in_use(made, A) == 0 and not made._in_flight._tracker.kept_uses()


def test_a_replica_that_leaves_or_begins_anew_keeps_nothing_for_anybody() -> None:
    for ends in (lambda made: made.remove_replica(A, 2.0), lambda made: made.on_evicted(CacheCleared(A), 2.0)):
        made, _ = split()
        made.on_transfer_failed(Q, 1.1, kept_s=20.0)
        made.on_finish(Q, 0, 1.1)
        ends(made)
        made.check()
        assert not made._in_flight._tracker.kept_uses()


@pytest.mark.parametrize(
    "end",
    [
        lambda made: made.on_first_token(Q, 1.2),
        lambda made: made.on_finish(Q, 0, 1.2),
        lambda made: made.on_finish(Q, 5, 1.2),
        lambda made: made.move(Q, A, 0.1),
        lambda made: made.remove_replica(A, 0.1),
        lambda made: made.remove_replica(B, 0.1),
    ],
)
def test_whatever_ends_a_split_nothing_of_it_is_left(end: Callable[[GlobalScheduler], object]) -> None:
    made, _ = split(reports_events=False)
    end(made)
    made.check()
    for replica_id in made.snapshot().replicas:
        if Q in made._in_flight.entries and replica_id == made._cluster.replicas.replica_id(
            made._in_flight.entries[Q].replica
        ):
            continue
        assert waiting_s(made, replica_id) == 0.0
    made.on_timer(1000.0)
    made.check()


def test_a_split_of_another_gateway_counts_on_both() -> None:
    known = {"block_size": BLOCK, "transfer_group": "all", "splits": True}
    made, peer = scheduler_of("preble", A, B, model=CostModel(PROFILE), **known), PeerId("east")
    made.assume(PeerReported(peer, Q, PeerPlaced(B, 1000, 400, pack_tokens(DOC), source=A)), 0.0)
    made.check()
    assert (waiting_s(made, A), waiting_s(made, B)) == (pytest.approx(0.6), 0.0)
    made.assume(PeerReported(peer, Q, TRANSFER_FAILED), 0.1)
    made.check()
    assert (waiting_s(made, A), waiting_s(made, B)) == (0.0, pytest.approx(1.0))


def test_of_two_sources_the_one_with_the_shorter_queue_computes() -> None:
    made = with_roles(A, B, C)
    made.place(Request(RequestId("queued"), pack_tokens(run_of(90, 4000)), avoid=frozenset({B, C})), 0.0)
    made.place(Request(RequestId("computes"), pack_tokens(run_of(91, 4000)), avoid=frozenset({A, B})), 0.0)
    made.on_finish(RequestId("computes"), 200, 0.0)
    transfer = ask(made).transfer
    assert transfer is not None and transfer.source == C


def test_explain_says_who_computes_and_who_decodes() -> None:
    _, placement = split()
    recent = RecentDecisions("preble", 10)
    recent.on(PlacedAt(placement, 0.0), Started(), 0.0)
    (decision,) = recent.of_request("q")
    text = " ".join(explain(decision).split())
    assert "a computes the prompt and sends 990 tokens there, in 1.109 s" in text


@pytest.mark.parametrize("tokens_per_s", [500, 1_000, 2_000, 10_000])
def test_what_a_split_would_have_cost_is_less_than_what_was_chosen_before_it_where_it_was_made(
    tokens_per_s: int,
) -> None:
    profile = replace(PROFILE, link_bytes_per_s=10.0 * tokens_per_s)
    placement = ask(with_roles(profile=profile))
    ways = {candidate.replica_id: candidate.ways for candidate in placement.candidates}
    before = min(of_one.computed_s for of_one in ways.values() if of_one is not None)
    split_to_b = ways[B].split_s if ways[B] is not None else None
    assert split_to_b is not None and (split_to_b < before) is (placement.transfer is not None)


def test_what_a_split_would_have_cost_is_not_known_where_nobody_may_split() -> None:
    for candidate in ask(with_roles(splits=False)).candidates:
        assert candidate.ways is not None and candidate.ways.split_s is None
