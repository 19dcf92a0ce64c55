"""What a prompt will find in a cache for which more has been placed than it can hold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import BlocksStored, CacheCleared, Placement, ReplicaId, Request, RequestId, pack_tokens
from preble.lab.sim import SimConfig, Simulation
from preble.lab.workloads import Stream, WorkloadPlan
from preble.profiles import load_profile
from support.by_hand import A, B, C, run_of, scheduler_of

OLD, NEW, NEXT = (run_of(seed, 40) for seed in (1, 2, 3))


def crowded(*names: ReplicaId, capacity: int | None = 100, reports_events: bool = True) -> GlobalScheduler:
    """On A, a prompt is cached and another one waits: 80 tokens."""
    made = scheduler_of(
        "round_robin", *names, block_size=10, kv_capacity_tokens=capacity, reports_events=reports_events
    )
    place(made, "old", OLD)
    made.on_first_token(RequestId("old"), 0.0)
    if reports_events:
        made.on_stored(BlocksStored(A, (1, 2, 3, 4), None, pack_tokens(OLD), 10), 0.0)
    made.on_finish(RequestId("old"), 1, 0.0)
    made.on_timer(10.0)
    place(made, "new", NEW, now=10.0)
    return made


def place(made: GlobalScheduler, name: str, prompt: Sequence[int], where: ReplicaId = A, now: float = 0.0) -> None:
    others = frozenset({A, B, C} - {where})
    made.place(Request(RequestId(name), pack_tokens([*prompt]), avoid=others), now)


def found(made: GlobalScheduler, prompt: Sequence[int]) -> int:
    """Tokens of the prompt that a request would find on A."""
    return made.matched_tokens(A, Request.of("probe", [*prompt, 0]))


def test_all_counts_while_it_fits() -> None:
    made = crowded(A)
    assert (found(made, OLD), found(made, NEW)) == (40, 40)


def test_the_end_of_what_was_used_longest_ago_will_be_gone() -> None:
    """120 tokens in a cache of 100: of the oldest 40, half are left, those at the beginning."""
    made = crowded(A)
    place(made, "next", NEXT, now=11.0)
    assert (found(made, OLD), found(made, NEW), found(made, NEXT)) == (20, 40, 40)


def test_what_is_asked_for_again_stays_and_the_next_oldest_goes() -> None:
    made = crowded(A)
    place(made, "again", OLD, now=11.0)
    place(made, "next", NEXT, now=12.0)
    assert (found(made, OLD), found(made, NEW), found(made, NEXT)) == (40, 20, 40)


def test_several_prompts_go_if_one_is_not_enough() -> None:
    made = crowded(A)
    place(made, "long", run_of(4, 90), now=11.0)
    assert (found(made, OLD), found(made, NEW)) == (0, 10)


def test_it_counts_again_when_what_waited_there_is_withdrawn() -> None:
    made = crowded(A)
    place(made, "next", NEXT, now=11.0)
    made.on_finish(RequestId("next"), 0, 11.0)
    assert found(made, OLD) == 40


def test_a_replica_without_events_is_crowded_as_well() -> None:
    made = crowded(A, reports_events=False)
    place(made, "next", NEXT, now=11.0)
    assert (found(made, OLD), found(made, NEW), found(made, NEXT)) == (20, 40, 40)


def test_a_replica_of_unknown_capacity_is_never_crowded() -> None:
    made = crowded(A, capacity=None)
    place(made, "long", run_of(4, 1000), now=11.0)
    assert found(made, OLD) == 40


def test_a_shared_prefix_stays_as_long_as_its_latest_user() -> None:
    made = crowded(A)
    place(made, "follow-up", OLD[:20] + run_of(5, 20), now=11.0)
    place(made, "next", NEXT, now=12.0)
    assert found(made, OLD) == 20


def test_what_a_request_uses_goes_after_all_that_is_idle() -> None:
    """Also where that is reported later: so a gateway hears, after it has joined, what was cached before."""
    made = crowded(A)
    made.on_evicted(CacheCleared(A, is_past=True), 11.0)
    past = run_of(4, 80)
    made.on_stored(BlocksStored(A, tuple(range(11, 19)), None, pack_tokens(past), 10), 12.0)
    assert (found(made, past), found(made, NEW)) == (60, 40)
    made.on_finish(RequestId("new"), 1, 13.0)
    assert found(made, NEW) == 40, "its report has not come yet"


@pytest.mark.parametrize("names", [(A, B), (A, B, C)], ids=["two replicas", "three replicas"])
def test_a_policy_sees_it_of_however_many_replicas(names: tuple[ReplicaId, ...]) -> None:
    made = scheduler_of("preble", *names, block_size=10, kv_capacity_tokens=100, reports_events=True)
    for i, prompt in enumerate((OLD, NEW, NEXT)):
        place(made, f"q{i}", prompt, now=float(i))
    seen = made.place(Request.of("probe", [*OLD, 0]), 3.0)
    assert {c.replica_id: c.matched_tokens for c in seen.candidates} == {A: 20} | dict.fromkeys(names[1:], 0)


def test_replicas_find_what_was_expected_where_queues_are_long() -> None:
    """Overloaded, with caches for half of the documents. If all that waits counted as cached, nearly all would hit."""
    plan = WorkloadPlan(
        source="streams",
        requests=200,
        rps=8.0,
        seed=1,
        streams=(Stream(prefixes=12, prefix_tokens=8000, question_tokens=100, output_tokens=10),),
    )
    config = SimConfig(profile=load_profile("a6000-mistral-7b"), replicas=2, kv_tokens=50_000, policy="least_load")
    expected: list[int] = []

    def note(placement: Placement, now: float) -> None:
        expected.append(placement.matched_tokens)

    summary = Simulation(config, plan.make(), on_placement=note).run().summary
    assert summary.cached_tokens is not None and summary.prompt_tokens
    assert sum(expected) / summary.prompt_tokens == pytest.approx(
        summary.cached_tokens / summary.prompt_tokens, abs=0.05
    )
