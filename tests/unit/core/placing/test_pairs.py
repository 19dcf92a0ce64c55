"""Replicas with fixed roles: which pair gets a request, what it counts for on both, and what is missing without one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from preble.core.costs.model import CostModel, CostProfile
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.preble import Preble
from preble.core.policies.registry import policy_names
from preble.core.types import (
    PeerId,
    Placement,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Role,
    TransferKind,
    pack_tokens,
)
from preble.core.types.events import PeerPlaced, PeerReported
from preble.core.types.life import (
    FIRST_TOKEN,
    TRANSFER_FAILED,
    TRANSFERRED,
    Ended,
    FirstToken,
    Started,
    TransferFailed,
    Transferred,
)
from preble.decisions.explain import explain
from preble.decisions.recent import PlacedAt, RecentDecisions
from preble.errors import NoReplicaError
from support.by_hand import A, B, C, D, run_of, scheduler_of

NO_LINK = CostProfile("unit", "made up", ((0, 0.0), (1000, 1.0)), 0.0, 0.02, 0.001, 0.0, 100_000)
PROFILE = replace(NO_LINK, kv_bytes_per_token=10, link_bytes_per_s=100_000.0, link_latency_s=0.01)
"""A token takes 1 ms to compute and 0.1 ms to send; a transfer takes 10 ms more."""
DOC, OTHER = run_of(3, 1000), run_of(4, 1000)
P1, P2, D1, D2 = A, B, C, D
E = ReplicaId("e")
PeerFact = Transferred | TransferFailed | FirstToken | Ended


def fleet(policy: str = "preble", *, profile: CostProfile = PROFILE, **roles: Role) -> GlobalScheduler:
    """Two replicas of each role, or those of `roles`."""
    made = scheduler_of(policy, model=CostModel(profile))
    given = roles or {P1: Role.PREFILL, P2: Role.PREFILL, D1: Role.DECODE, D2: Role.DECODE}
    for name, role in given.items():
        made.add_replica(spec_of(ReplicaId(name), role), 0.0)
    return made


def spec_of(replica: ReplicaId, role: Role, *, answers_alone: bool = False) -> ReplicaSpec:
    """Return the spec of a replica as SGLang has them, or vLLM, which answers alone whatever its role."""
    return ReplicaSpec(
        replica,
        100_000,
        block_size=10,
        transfer_group="g",
        role=role,
        answers_alone=answers_alone or role is not Role.DECODE,
    )


def ask(made: GlobalScheduler, name: str, prompt: list[int], *avoid: ReplicaId, now: float = 0.0) -> Placement:
    placement = made.place(Request(RequestId(name), pack_tokens(prompt), avoid=frozenset(avoid)), now)
    made.check()
    return placement


def finish(made: GlobalScheduler, name: str, *, output_tokens: int = 50, cached: int | None = None) -> None:
    made.on_first_token(RequestId(name), 0.0)
    made.check()
    made.on_finish(RequestId(name), output_tokens, 0.0, cached_tokens=cached)
    made.check()


def source_of(placement: Placement) -> ReplicaId:
    assert placement.prefill_source is not None
    return placement.prefill_source


@pytest.mark.parametrize("policy", policy_names())
def test_each_policy_places_a_request_on_a_pair_and_on_no_replica_of_a_wrong_role(policy: str) -> None:
    made = fleet(policy)
    for i in range(12):
        placement = ask(made, str(i), run_of(i, 200))
        assert placement.replica_id in (D1, D2)
        assert source_of(placement) in (P1, P2)
        assert placement.transfer is not None and placement.transfer.kind is TransferKind.PREFILL


def test_the_source_is_where_the_prefix_is_cached_and_the_target_where_least_decodes() -> None:
    made = fleet()
    ask(made, "other", OTHER, P2)
    ask(made, "first", DOC, P1, D1)
    finish(made, "first")
    finish(made, "other")
    made.place(Request(RequestId("decodes"), pack_tokens(run_of(9, 20)), avoid=frozenset({D2})), 0.0)
    made.on_first_token(RequestId("decodes"), 0.0)
    again = ask(made, "again", DOC)
    assert (source_of(again), again.replica_id) == (P2, D2)


def test_a_long_queue_at_the_source_with_the_prefix_sends_the_prompt_to_the_other_one() -> None:
    made = fleet()
    ask(made, "first", DOC, P1)
    finish(made, "first")
    for i in range(5):
        ask(made, f"queued-{i}", run_of(20 + i, 8000), P1)
    assert source_of(ask(made, "again", DOC)) == P1


def test_both_of_a_pair_are_booked_until_the_first_token_and_the_target_computes_nothing() -> None:
    made = fleet()
    placement = ask(made, "q", DOC)
    rows = made.snapshot().replicas
    assert rows[source_of(placement)].waiting_prefill_s == pytest.approx(1.0)
    assert rows[placement.replica_id].waiting_prefill_s < 0.02
    assert placement.predicted_ttft_s is not None and 1.1 < placement.predicted_ttft_s < 1.2
    made.on_first_token(RequestId("q"), 1.2)
    made.check()
    rows = made.snapshot().replicas
    assert rows[source_of(placement)].waiting_prefill_s == 0
    assert rows[placement.replica_id].num_requests == 1


def test_of_a_target_that_reports_nothing_nothing_is_learned() -> None:
    made = fleet()
    placement = ask(made, "q", DOC)
    finish(made, "q", cached=500)  # which were the source's
    made.on_timer(5.0)
    request = Request(RequestId("asked"), pack_tokens(DOC))
    assert made.matched_tokens(placement.replica_id, request) == 0
    assert made.matched_tokens(source_of(placement), request) == 990
    assert made.snapshot().replicas[placement.replica_id].drift.num_requests == 0


def test_the_window_keeps_the_work_of_each_pool_so_that_later_prompts_avoid_a_busy_source() -> None:
    made = fleet()
    first = ask(made, "q", DOC)
    finish(made, "q")
    rows = made.snapshot().replicas
    assert rows[source_of(first)].load_s > 1.0
    assert 0.0 < rows[first.replica_id].load_s < 1.0


def test_what_is_matched_is_what_the_source_has_cached_and_an_explanation_names_both() -> None:
    made = fleet()
    recent = RecentDecisions("preble", 10)
    ask(made, "first", DOC)
    finish(made, "first")
    placement = ask(made, "again", DOC)
    assert placement.matched_tokens == 990
    recent.on(PlacedAt(placement, 0.0), Started(), 0.0)
    (decision,) = recent.of_request("again")
    text = " ".join(explain(decision).split())
    assert f"{source_of(placement)} computes the prompt and sends 990 tokens there" in text
    assert "990 are cached at best" in text


def test_what_a_second_before_the_first_token_counts_is_the_policys() -> None:
    costs = []
    for weight in (3.0, 9.0):
        made = GlobalScheduler(Preble(ttft_weight=weight), CostModel(PROFILE))
        for name, role in ((P1, Role.PREFILL), (D1, Role.DECODE)):
            made.add_replica(ReplicaSpec(name, 100_000, block_size=10, transfer_group="g", role=role), 0.0)
        [candidate] = ask(made, "q", DOC).candidates
        costs.append(candidate.cost_s)
    assert costs[1] == pytest.approx(costs[0] * 10.0 / 4.0), "nobody else waits"


def test_of_equal_targets_none_is_said_to_be_drawn_by_lot() -> None:
    made = fleet()
    recent = RecentDecisions("preble", 10)
    recent.on(PlacedAt(ask(made, "q", DOC), 0.0), Started(), 0.0)
    text = " ".join(explain(recent.of_request("q")[0]).split())
    assert "is one of 2, with fewest requests in flight, where" in text


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("over", [TRANSFERRED, TRANSFER_FAILED, FIRST_TOKEN, Ended(output_tokens=3)])
def test_a_pair_that_another_gateway_has_made_counts_on_both(is_known: bool, over: PeerFact) -> None:
    made, peer, theirs = fleet(), PeerId("east"), RequestId("theirs")
    prompt = pack_tokens(DOC) if is_known else None
    assert made.assume(PeerReported(peer, theirs, PeerPlaced(D1, 1000, 0, prompt, source=P1)), 0.0)
    made.check()
    rows = made.snapshot().replicas
    assert (rows[P1].waiting_prefill_tokens, rows[D1].waiting_prefill_tokens) == (1000, 0)
    assert source_of(ask(made, "ours", OTHER)) == P2
    assert made.assume(PeerReported(peer, theirs, over), 0.1)
    made.check()
    assert made.snapshot().replicas[P1].waiting_prefill_tokens == 0
    made.forget_peer(peer, 0.2)
    made.check()


@pytest.mark.parametrize("source", [E, D1])
def test_a_pair_of_another_gateway_whose_source_is_unknown_here_counts_on_its_target(source: ReplicaId) -> None:
    made = fleet()
    fact = PeerPlaced(D1, 1000, 0, pack_tokens(DOC), source=source)
    assert made.assume(PeerReported(PeerId("east"), RequestId("theirs"), fact), 0.0)
    made.check()
    assert made.snapshot().replicas[D1].num_requests == 1


def test_without_a_link_in_the_profile_pairs_are_made_all_the_same() -> None:
    made = fleet(profile=NO_LINK)
    placement = ask(made, "q", DOC)
    assert placement.transfer is not None and placement.transfer.seconds == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(("role", "said"), [(Role.PREFILL, "none that decodes"), (Role.DECODE, "none that computes")])
def test_one_role_alone_takes_no_request_and_the_error_says_which_is_missing(role: Role, said: str) -> None:
    made = fleet(**{A: role, B: role})
    with pytest.raises(NoReplicaError, match=said):
        ask(made, "q", DOC)


@pytest.mark.parametrize("policy", ["preble", "least_load"])
def test_a_replica_that_decodes_computes_the_prompt_where_it_can_and_there_is_no_pair(policy: str) -> None:
    made = scheduler_of(policy, model=CostModel(PROFILE))
    made.add_replica(spec_of(D1, Role.DECODE), 0.0)
    made.add_replica(spec_of(D2, Role.DECODE, answers_alone=True), 0.0)
    for name in ("first", "second"):
        alone = ask(made, name, DOC)
        assert alone.replica_id == D2 and alone.transfer is None
    made.add_replica(spec_of(P1, Role.PREFILL), 0.0)
    assert source_of(ask(made, "paired", DOC)) == P1
    assert ask(made, "avoiding", DOC, P1).replica_id == D2


def test_what_cannot_be_split_goes_where_it_is_answered_alone_and_to_a_pair_only_if_it_is_nowhere() -> None:
    whole = Request(RequestId("whole"), pack_tokens(DOC), splits=False)
    made = fleet(**{P1: Role.PREFILL, D1: Role.DECODE})
    assert made.place(whole, 0.0).transfer is not None
    made.add_replica(spec_of(D2, Role.DECODE, answers_alone=True), 0.0)
    placement = made.place(Request(RequestId("second"), pack_tokens(DOC), splits=False), 0.0)
    assert (placement.replica_id, placement.transfer) == (D2, None)


def test_a_request_that_avoids_every_source_takes_no_pair() -> None:
    with pytest.raises(NoReplicaError, match="none that computes"):
        ask(fleet(), "q", DOC, P1, P2)


def test_pairs_are_made_within_one_transfer_group() -> None:
    made = scheduler_of("preble", model=CostModel(PROFILE))
    for name, group, role in ((A, "old", Role.PREFILL), (B, "new", Role.PREFILL), (C, "new", Role.DECODE)):
        made.add_replica(ReplicaSpec(name, block_size=10, transfer_group=group, role=role), 0.0)
    ask(made, "busy", run_of(8, 9000))
    assert source_of(ask(made, "q", DOC)) == B


def test_a_mixed_replica_takes_what_is_cheaper_there_and_a_pair_the_rest() -> None:
    made = fleet(**{A: Role.PREFILL, C: Role.DECODE, E: Role.MIXED})
    placements = [ask(made, str(i), run_of(i, 2000)) for i in range(6)]
    assert {placement.replica_id for placement in placements} == {C, E}
    assert all((placement.transfer is None) == (placement.replica_id == E) for placement in placements)


@pytest.mark.parametrize("gone", [P1, D1])
def test_when_one_of_a_pair_leaves_nothing_of_it_stays_booked(gone: ReplicaId) -> None:
    made = fleet(**{P1: Role.PREFILL, D1: Role.DECODE})
    ask(made, "q", DOC)
    orphans = made.remove_replica(gone, 1.0)
    made.check()
    if gone == D1:
        assert [request.request_id for request in orphans] == ["q"]
    else:
        made.on_finish(RequestId("q"), 0, 1.0)
    made.check()
    assert all(row.waiting_prefill_s == 0 for row in made.snapshot().replicas.values())


@pytest.mark.parametrize(("capacity", "best"), [(100_000, D1), (2500, D2)])
def test_a_target_with_little_to_decode_gets_the_request_if_it_has_room(capacity: int, best: ReplicaId) -> None:
    made = scheduler_of("preble", model=CostModel(PROFILE))
    for name, tokens in ((A, 100_000), (C, capacity), (D, 100_000)):
        role = Role.PREFILL if name == A else Role.DECODE
        made.add_replica(ReplicaSpec(name, tokens, block_size=10, transfer_group="g", role=role), 0.0)
    ask(made, "teaches-how-long-answers-are", run_of(5, 20))
    finish(made, "teaches-how-long-answers-are", output_tokens=1000)
    ask(made, "held", run_of(1, 2000), D2)
    made.on_first_token(RequestId("held"), 0.0)
    for i in range(4):
        ask(made, f"short-{i}", run_of(10 + i, 20), D1)
        made.on_first_token(RequestId(f"short-{i}"), 0.0)
    assert ask(made, "q", DOC).replica_id == best


def test_a_forecast_is_by_those_that_compute_prompts() -> None:
    made = fleet()
    ask(made, "first", DOC)
    finish(made, "first")
    again = Request(RequestId("again"), pack_tokens(DOC))
    assert made.forecast(again, 0.0).prefill_s < 0.1  # the source has it, though no target does
    for i in range(2):
        ask(made, f"busy-{i}", run_of(10 + i, 5000))
    assert made.forecast(again, 0.0).ttft_s > 4.0
