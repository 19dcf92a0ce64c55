"""E2 through the scheduler's door: literal prompts in, replicas and costs out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import (
    BlocksEvicted,
    BlocksStored,
    CacheCleared,
    Placement,
    Reason,
    ReplicaId,
    Request,
    RequestId,
    pack_tokens,
)
from preble.errors import NoReplicaError, PromptTooLong, UnknownRequest
from preble.lab.sim import SimConfig, simulate
from preble.lab.workloads import WorkloadPlan
from preble.profiles import load_profile
from support.by_hand import MODEL, A, B, C, Cluster, D, chosen, run_of, scheduler_of


def scheduler(*replica_ids: ReplicaId, policy: str = "e2", seed: int = 0, **spec: object) -> GlobalScheduler:
    return scheduler_of(policy, *replica_ids, seed=seed, **spec)


def place(made: GlobalScheduler, request_id: str, prompt: Sequence[int], now: float = 0.0) -> Placement:
    return made.place(Request.of(request_id, prompt), now)


def finish(made: GlobalScheduler, request_id: str, output_tokens: int = 1, now: float = 0.0) -> None:
    made.on_finish(RequestId(request_id), output_tokens, now)


def test_exploits_when_less_is_missed_than_cached() -> None:
    made = scheduler(A, B)
    document = run_of(1, 100)
    first = place(made, "first", document)
    second = place(made, "second", document + run_of(2, 99))
    assert first.reason is Reason.EXPLORE
    assert (second.reason, second.replica_id, second.matched_tokens) == (Reason.EXPLOIT, first.replica_id, 100)


def test_explores_when_as_much_is_missed_as_cached() -> None:
    made = scheduler(A, B)
    document = run_of(1, 100)
    first = place(made, "first", document)
    second = place(made, "second", document + run_of(2, 100))
    assert second.reason is Reason.EXPLORE
    assert second.replica_id != first.replica_id


def test_less_than_a_block_is_not_worth_following() -> None:
    made = scheduler(A, B, block_size=16)
    first = place(made, "first", [1, 2, 3, 4])
    again = place(made, "again", [1, 2, 3, 4])
    assert (again.reason, again.matched_tokens) == (Reason.EXPLORE, 0)
    assert again.replica_id != first.replica_id


def test_identical_prompts_go_to_one_replica() -> None:
    """Defect 1 of the published code: exact duplicates were scattered over all replicas."""
    made = scheduler(A, B, C, D)
    prompt = run_of(1, 50)
    assert len({place(made, str(i), prompt).replica_id for i in range(4)}) == 1


def test_the_cost_of_a_candidate_is_l_plus_m_plus_p() -> None:
    made = scheduler(A, B)
    document = run_of(1, 100)
    first = place(made, "first", document)
    finish(made, "first", output_tokens=20)
    second = place(made, "second", document[:40] + run_of(2, 60))
    by_replica = {candidate.replica_id: candidate for candidate in second.candidates}
    holder, other = by_replica.pop(first.replica_id), next(iter(by_replica.values()))
    assert (holder.matched_tokens, other.matched_tokens) == (40, 0)
    assert holder.load_s == pytest.approx(0.100 + MODEL.decode_s(20, 100))
    assert holder.prefill_s == pytest.approx(0.060)
    assert (other.load_s, other.prefill_s) == (0.0, pytest.approx(0.100))
    assert second.replica_id == other.replica_id


def test_eviction_cost_counts_what_is_shared_and_only_what_must_go() -> None:
    made = scheduler(A, kv_capacity_tokens=300, reports_events=False)
    shared, lonely = run_of(1, 100), run_of(2, 100)
    for i in range(3):
        place(made, f"shared{i}", shared, now=float(i))
        finish(made, f"shared{i}", now=float(i))
    place(made, "lonely", lonely, now=3.0)
    finish(made, "lonely", now=3.0)
    fits = place(made, "fits", run_of(3, 99), now=4.0).candidates[0]
    assert fits.eviction_s == 0.0
    made.on_finish(RequestId("fits"), 0, 4.0)
    evicts = place(made, "evicts", run_of(4, 119), now=5.0).candidates[0]
    # 119 + 1 tokens are needed and 100 are free: 20 of `shared` must go, the least recently used; 3 of 4 use it
    assert evicts.eviction_s == pytest.approx(0.020 * 3 / 4)


def test_the_request_s_own_cached_prefix_is_no_victim() -> None:
    """The engine locks what it is about to use; only `new` can go, though `old` was used longer ago."""
    made = scheduler(A, kv_capacity_tokens=400)
    for i, name in enumerate(("old", "new")):
        place(made, name, run_of(i, 190), now=float(i))
        finish(made, name, now=float(i))
    place(made, "new again", run_of(1, 190), now=2.0)
    finish(made, "new again", now=2.0)
    candidate = place(made, "old again", run_of(0, 190) + run_of(3, 49), now=3.0).candidates[0]
    # 49 + 1 tokens are needed and 20 are free: 30 of `new` must go, which 2 of 3 requests use
    assert candidate.eviction_s == pytest.approx(0.030 * 2 / 3)


def test_the_end_of_a_prefix_that_nobody_holds_or_uses_is_dropped() -> None:
    made = scheduler_of("e2", A, settings={"window_s": 10.0}, kv_capacity_tokens=1000)
    place(made, "q", run_of(1, 900))
    finish(made, "q")
    place(made, "next", run_of(2, 400), now=20.0)
    made.on_finish(RequestId("next"), 1, 20.0)
    made.on_timer(40.0)
    assert made.snapshot().num_index_tokens == 1000
    made.check()


def test_nothing_in_use_counts_as_a_victim() -> None:
    made = scheduler(A, kv_capacity_tokens=100)
    place(made, "running", run_of(1, 80))
    candidate = place(made, "next", run_of(2, 60)).candidates[0]
    assert candidate.eviction_s == 0.0


def test_a_replica_that_has_only_finished_short_answers_is_not_lighter_for_it() -> None:
    made = scheduler(A, B)
    where = {f"q{i}": place(made, f"q{i}", run_of(i + 1, 100)).replica_id for i in range(8)}
    for request_id, replica in where.items():
        if request_id in ("q0", "q1", "q2", "q3"):
            finish(made, request_id, output_tokens=10 if replica == A else 1000)
    load_s = {replica: state.load_s for replica, state in made.snapshot().replicas.items()}
    assert load_s[A] == pytest.approx(load_s[B])


@pytest.mark.slow
def test_without_shared_prompts_e2_is_as_fast_as_least_load() -> None:
    profile = load_profile("a6000-mistral-7b")
    workload = WorkloadPlan(source="unshared", requests=500, rps=15.0).make()
    ttft_s = {}
    for policy in ("e2", "least_load"):
        summary = simulate(SimConfig(profile=profile, replicas=4, policy=policy), workload).summary
        assert summary.ttft is not None
        ttft_s[policy] = summary.ttft.mean_s
    assert ttft_s["e2"] < 1.2 * ttft_s["least_load"]


def test_cold_prompts_of_one_instant_spread_evenly() -> None:
    made = scheduler(A, B, C, D)
    placed = Counter(place(made, str(i), run_of(i, 500)).replica_id for i in range(64))
    assert placed == {A: 16, B: 16, C: 16, D: 16}


def test_a_short_system_prompt_does_not_pull_everything_to_one_replica() -> None:
    """Complaint 1 of other routers' users."""
    made = scheduler(A, B, C, D)
    system = run_of(0, 100)
    placed: Counter[ReplicaId] = Counter()
    for i in range(64):
        placed[place(made, str(i), system + run_of(i + 1, 400), now=float(i)).replica_id] += 1
        finish(made, str(i), output_tokens=10, now=float(i))
    assert len(placed) == 4 and max(placed.values()) <= 18


def test_equal_replicas_do_not_all_fall_on_the_first() -> None:
    chosen = {place(scheduler(A, B, C, D, seed=seed), "q", run_of(1, 10)).replica_id for seed in range(32)}
    assert chosen == {A, B, C, D}


def test_the_holder_of_the_key_portion_wins_over_the_holder_of_a_shorter_beginning() -> None:
    made = scheduler(A, B, C)
    system, tool = run_of(0, 20), run_of(1, 100)
    elsewhere = place(made, "system", system + run_of(2, 100)).replica_id
    holder = place(made, "tool", system + tool).replica_id
    assert holder != elsewhere
    again = place(made, "again", system + tool + run_of(3, 10))
    assert (again.reason, again.replica_id, again.matched_tokens) == (Reason.EXPLOIT, holder, 120)


def test_of_two_holders_the_less_loaded_one_is_exploited() -> None:
    made = scheduler(A, B)
    prompt = run_of(1, 100)
    place(made, "a", prompt)
    made.move(RequestId("a"), A, 0.0)
    place(made, "b", prompt)
    made.move(RequestId("b"), B, 0.0)
    place(made, "load", run_of(2, 500))
    made.move(RequestId("load"), A, 0.0)
    assert place(made, "q", [*prompt, 7]).replica_id == B


def test_an_evicted_prefix_is_not_exploited() -> None:
    made = scheduler(A, B, reports_events=True)
    prompt = run_of(1, 100)
    holder = place(made, "first", prompt).replica_id
    made.on_stored(BlocksStored(holder, (11, 12), None, pack_tokens(prompt), 50), 0.0)
    finish(made, "first")
    assert place(made, "hit", [*prompt, 1], now=10.0).matched_tokens == 100
    made.on_finish(RequestId("hit"), 0, 10.0)
    made.on_evicted(BlocksEvicted(holder, (12,)), 10.0)
    assert made.matched_tokens(holder, Request.of("probe", [*prompt, 1])) == 50
    made.on_evicted(CacheCleared(holder), 10.0)
    assert place(made, "miss", [*prompt, 1], now=10.0).reason is Reason.EXPLORE


def test_a_cleared_cache_ends_promises_at_once() -> None:
    made = scheduler(A, reports_events=True)
    place(made, "first", run_of(1, 100))
    finish(made, "first", now=1.0)
    made.on_evicted(CacheCleared(A), 1.1)
    assert place(made, "next", run_of(1, 100), now=1.2).matched_tokens == 0
    made.check()


def test_a_cleared_cache_of_the_past_ends_no_promise() -> None:
    """Past events are replayed after a replica has joined: what they say was before the requests that it serves now."""
    made = scheduler(A, reports_events=True)
    place(made, "first", run_of(1, 100))
    finish(made, "first", now=1.0)
    made.on_evicted(CacheCleared(A, is_past=True), 1.1)
    assert place(made, "next", run_of(1, 100), now=1.2).matched_tokens == 99
    made.on_finish(RequestId("next"), 0, 1.2)
    assert place(made, "late", run_of(1, 100), now=9.0).matched_tokens == 0
    made.check()


def test_a_promise_that_is_not_kept_expires() -> None:
    """A replica that reports events but stored nothing holds nothing, once its report is overdue."""
    made = scheduler(A, reports_events=True)
    place(made, "first", run_of(1, 100))
    finish(made, "first", now=1.0)
    assert place(made, "soon", run_of(1, 100), now=1.5).matched_tokens == 99
    made.on_finish(RequestId("soon"), 0, 1.5)
    assert place(made, "late", run_of(1, 100), now=3.0).matched_tokens == 0


def test_a_failed_request_leaves_no_load_behind() -> None:
    made = scheduler(A, B)
    place(made, "q", run_of(1, 100))
    made.on_finish(RequestId("q"), 0, 0.0)
    assert made.snapshot().num_in_flight == 0
    assert all(made.snapshot().replicas[replica].load_s == 0.0 for replica in (A, B))
    made.check()


def test_a_replica_that_lost_a_prefix_is_believed_to_have_lost_what_is_older() -> None:
    made = scheduler(A)
    for i in range(3):
        place(made, str(i), run_of(i, 100), now=float(i))
        finish(made, str(i), now=float(i))
    place(made, "again", run_of(1, 100), now=5.0)
    made.on_finish(RequestId("again"), 1, 5.0, cached_tokens=0)
    matched = [made.matched_tokens(A, Request.of("probe", [*run_of(i, 100), 1])) for i in range(3)]
    assert matched == [0, 100, 100]
    assert made.snapshot().replicas[A].drift.predicted_tokens == 99


def test_holdings_without_reports_expire() -> None:
    made = scheduler_of("e2", A, settings={"window_s": 10.0, "belief_ttl_s": 60.0})
    place(made, "q", run_of(1, 100))
    finish(made, "q")
    made.on_timer(59.0)
    assert made.snapshot().replicas[A].cached_tokens == 100
    made.on_timer(64.0)
    assert made.snapshot().replicas[A].cached_tokens == 0
    assert made.snapshot().num_index_tokens == 0


def test_a_removed_replica_returns_its_requests_and_leaves_nothing() -> None:
    made = scheduler(A, B)
    placed = {str(i): place(made, str(i), run_of(i, 50)).replica_id for i in range(6)}
    orphans = made.remove_replica(A, 1.0)
    assert {request.request_id for request in orphans} == {q for q, where in placed.items() if where == A}
    for request in orphans:
        assert made.place(request, 1.0).replica_id == B
    for request_id in placed:
        finish(made, request_id, now=2.0)
    made.remove_replica(B, 2.0)
    assert (made.snapshot().num_in_flight, made.snapshot().num_index_tokens) == (0, 0)
    made.check()


def test_a_drained_replica_does_not_count_as_the_lightest() -> None:
    """It is idle, but no request can go there: so the holder is not heavy compared with those that can have it."""

    def where(drained: frozenset[ReplicaId]) -> tuple[ReplicaId, Reason]:
        made, document = Cluster("e2", A, B, C), run_of(1, 100)
        made.hold(A, document)
        made.put(A, run_of(2, 300))
        made.put(B, run_of(3, 350))
        return chosen(made.ask([*document, 1], avoid=drained))

    assert where(frozenset()) == (C, Reason.REDIRECT)
    assert where(frozenset({C})) == (A, Reason.EXPLOIT)


def test_errors_say_whose_fault_it_is() -> None:
    with pytest.raises(NoReplicaError):
        place(scheduler(), "q", [1])
    made = scheduler(A, kv_capacity_tokens=10)
    with pytest.raises(PromptTooLong, match=r"11 tokens.*10"):
        place(made, "q", run_of(1, 11))
    with pytest.raises(NoReplicaError, match="other"):
        made.place(Request(RequestId("q"), pack_tokens([1]), avoid=frozenset({A})), 0.0)
    place(made, "q", [1])
    with pytest.raises(UnknownRequest, match="already"):
        place(made, "q", [1])
    finish(made, "q")
    with pytest.raises(UnknownRequest, match="not in flight"):
        finish(made, "q")


def test_namespaces_do_not_share() -> None:
    made = scheduler(A)
    prompt = pack_tokens(run_of(1, 100))
    made.place(Request(RequestId("plain"), prompt), 0.0)
    assert made.place(Request(RequestId("salted"), prompt, namespace="salt"), 0.0).matched_tokens == 0


def test_round_robin_takes_each_in_turn() -> None:
    made = scheduler(A, B, C, policy="round_robin")
    assert [place(made, str(i), [1, 2, 3]).replica_id for i in range(5)] == [A, B, C, A, B]


def test_least_load_follows_outstanding_tokens_not_prefixes() -> None:
    made = scheduler(A, B, policy="least_load")
    prompt = run_of(1, 1000)
    first = place(made, "long", prompt).replica_id
    assert [place(made, str(i), prompt[:10]).replica_id == first for i in range(2)] == [False, False]
    finish(made, "long")
    assert place(made, "q", run_of(2, 10)).replica_id == first
