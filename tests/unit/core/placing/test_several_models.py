"""Several models behind one scheduler: each has its own replicas, prefixes, rates and limits."""

from __future__ import annotations

import pytest

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import make_policy, policy_names
from preble.core.types import BlocksStored, ReplicaId, ReplicaSpec, Request, RequestId, pack_tokens
from preble.errors import NoReplicaError, PromptTooLong
from support.by_hand import DOC, MODEL, A, B, C, run_of, scheduler_of


def request(name: str, model: str, prompt: list[int], *avoid: ReplicaId) -> Request:
    return Request(RequestId(name), pack_tokens(prompt), avoid=frozenset(avoid), model=model)


def fleet(policy: str = "preble", **specs: str) -> GlobalScheduler:
    """`specs`: replica -> its model."""
    made = scheduler_of(policy)
    for name, model in specs.items():
        made.add_replica(ReplicaSpec(ReplicaId(name), block_size=1, model=model), 0.0)
    return made


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_places_a_request_on_a_replica_of_its_model(policy: str) -> None:
    made = fleet(policy, a="small", b="large", c="small", d="large")
    for i in range(24):
        model = "large" if i % 3 else "small"
        placed = made.place(request(f"q{i}", model, DOC + run_of(i, 10)), i / 10)
        assert placed.replica_id in ("bd" if model == "large" else "ac")
        assert {candidate.replica_id for candidate in placed.candidates} <= set("bd" if model == "large" else "ac")
    made.check()


def test_prompts_of_different_models_share_nothing() -> None:
    made = fleet(a="small", b="large")
    made.place(request("one", "small", DOC), 0.0)
    assert made.place(request("two", "large", DOC), 0.0).matched_tokens == 0
    assert made.matched_tokens(A, request("probe", "", [*DOC, 1])) == 100
    made.check()


def test_events_count_for_the_model_of_their_replica() -> None:
    made = scheduler_of("preble")
    for name, model in ((A, "small"), (B, "large")):
        made.add_replica(ReplicaSpec(name, block_size=1, reports_events=True, model=model), 0.0)
    made.on_stored(BlocksStored(A, tuple(range(100)), None, pack_tokens(DOC), 1), 0.0)
    assert made.matched_tokens(A, request("probe", "small", [*DOC, 1])) == 100
    assert made.matched_tokens(A, request("probe", "large", [*DOC, 1])) == 0


def test_a_prompt_too_long_for_its_model_is_too_long_whatever_others_take() -> None:
    made = scheduler_of("preble")
    made.add_replica(ReplicaSpec(A, max_prompt_tokens=50, model="small"), 0.0)
    made.add_replica(ReplicaSpec(B, max_prompt_tokens=500, model="large"), 0.0)
    with pytest.raises(PromptTooLong, match="maximum context length is 50 tokens"):
        made.place(request("q", "small", DOC), 0.0)
    assert made.place(request("q", "large", DOC), 0.0).replica_id == B


def test_a_model_that_nobody_serves_has_no_replica() -> None:
    with pytest.raises(NoReplicaError, match="'huge'"):
        fleet(a="small").place(request("q", "huge", DOC), 0.0)


def test_a_replica_without_a_model_takes_requests_for_any() -> None:
    made = fleet(a="small", b="")
    assert made.place(request("q", "large", DOC), 0.0).replica_id == B
    assert {made.place(request(f"q{i}", "small", run_of(i, 9)), 0.0).replica_id for i in range(8)} == {A, B}


def hot_prefix(*models: str, drained: tuple[ReplicaId, ...] = ()) -> list[tuple[ReplicaId, bool]]:
    """Replicas a, b, ... of these models, all idle but those of the first; what becomes of its hot prefix.

    `drained`: those that get no more requests when its last one comes.
    """
    policy = make_policy("e2?threshold=1e9&calm=1e9&min_requests=4&interval_s=1")
    made = GlobalScheduler(policy, MODEL, window_s=40.0, belief_ttl_s=1e9)
    for name, model in zip("abc", models, strict=False):
        made.add_replica(ReplicaSpec(ReplicaId(name), block_size=1, model=model), 0.0)
    for name, prompt, avoid in (("load", run_of(9, 50), A), ("first", DOC, B)):
        made.place(request(name, "small", prompt, avoid, C), 0.0)
        made.on_first_token(RequestId(name), 0.1)
        made.on_finish(RequestId(name), 1, 0.1)
    for i in range(12):
        made.place(request(f"q{i}", "small", [*DOC, i], B, C), 2.0 + i / 10)
    for i in range(12):
        made.on_first_token(RequestId(f"q{i}"), 6.0)
        made.on_finish(RequestId(f"q{i}"), 1, 6.0)
    made.place(request("last", "small", [*DOC, 99], *drained), 6.0)
    made.on_first_token(RequestId("last"), 7.0)
    changes = [change for second in range(7, 12) for change in made.on_timer(float(second))]
    return [(change.replica_id, change.added) for change in changes]


def test_a_hot_prefix_is_replicated_to_a_replica_of_its_model() -> None:
    assert hot_prefix("small", "small") == [(B, True)]
    assert hot_prefix("small", "small", "large") == [(B, True)]


def test_a_hot_prefix_is_not_replicated_to_a_drained_replica() -> None:
    assert hot_prefix("small", "small", "small") == [(C, True)]
    assert hot_prefix("small", "small", "small", drained=(C,)) == [(B, True)]


def test_the_rate_of_requests_is_that_of_the_models_replicas() -> None:
    """`preble` weighs a queue by the rate of requests to come: those of another model never join it."""

    def cost_s(made: GlobalScheduler) -> float:
        made.place(request("s0", "small", run_of(70, 20)), 4.0)
        return made.place(request("s1", "small", run_of(71, 20)), 4.0).candidates[0].cost_s

    both, alone = fleet(a="small", b="large"), fleet(a="small")
    for made in (both, alone):
        made.place(request("first", "small", [1]), 0.0)
    for i in range(40):
        both.place(request(f"q{i}", "large", run_of(i, 20)), i / 10)
    assert cost_s(both) == cost_s(alone)
