"""KV blocks in the host's memory and in stores that replicas share: they count, at the price of loading them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from preble.core.costs.model import CostModel, CostProfile
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import (
    BlocksDemoted,
    BlocksEvicted,
    BlocksShared,
    BlocksStored,
    CacheCleared,
    Candidate,
    Placement,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Tier,
    Ways,
    pack_tokens,
)
from preble.core.types.life import Started
from preble.decisions.explain import explain
from preble.decisions.recent import PlacedAt, RecentDecisions
from support.by_hand import A, B, scheduler_of

PROFILE = CostProfile(
    "unit",
    "made up",
    ((0, 0.0), (1000, 1.0)),
    0.0,
    0.0,
    0.0001,
    0.0,
    100_000,
    host_load_s_per_token=0.0001,
    store_load_s_per_token=0.0005,
)
"""A token takes 1 ms to compute, 0.1 ms to load from the host's memory and 0.5 ms from a store."""

PROMPT = list(range(1, 65))
HASHES = (11, 12, 13, 14)


def scheduler(policy: str = "e2", profile: CostProfile = PROFILE, **spec: object) -> GlobalScheduler:
    known = {"block_size": 16, "reports_events": True, **spec}
    return scheduler_of(policy, A, B, model=CostModel(profile), settings={"belief_ttl_s": 100.0}, **known)


def store(made: GlobalScheduler, replica_id: ReplicaId = A, now: float = 0.0) -> None:
    assert made.on_stored(BlocksStored(replica_id, HASHES, None, pack_tokens(PROMPT), 16), now)


def matched(made: GlobalScheduler, replica_id: ReplicaId = A) -> int:
    made.check()
    return made.matched_tokens(replica_id, Request.of("x", [*PROMPT, 99]))


def candidates(made: GlobalScheduler, extra: int = 16, now: float = 1.0) -> dict[ReplicaId, Candidate]:
    """What the policy weighed for the prompt with `extra` further tokens."""
    placement = place(made, extra, now)
    made.on_finish(RequestId("q"), 0, now)
    return {candidate.replica_id: candidate for candidate in placement.candidates}


def place(made: GlobalScheduler, extra: int = 16, now: float = 1.0) -> Placement:
    return made.place(Request.of("q", [*PROMPT, *range(900, 900 + extra)]), now)


def test_a_block_is_cached_while_a_copy_is_left_in_any_tier() -> None:
    made = scheduler()
    store(made)
    made.on_evicted(BlocksDemoted(A, (14, 13, 12, 11), Tier.HOST), 0.0)
    assert matched(made) == 64
    made.on_evicted(BlocksEvicted(A, (14, 13), Tier.HOST), 0.0)
    assert matched(made) == 32
    made.on_evicted(BlocksEvicted(A, (12, 11), Tier.HOST), 0.0)
    assert matched(made) == 0
    assert made.snapshot().num_index_tokens == 0


def test_blocks_in_memory_and_on_the_host_count_together() -> None:
    made = scheduler()
    store(made)
    made.on_evicted(BlocksDemoted(A, (14,), Tier.HOST), 0.0)
    made.on_evicted(BlocksDemoted(A, (13,), Tier.HOST), 0.0)
    assert candidates(made)[A].matched_tokens == 64
    assert candidates(made)[A].loaded_tokens == 32
    store(made)  # the engine has loaded them
    assert candidates(made)[A].loaded_tokens == 0
    made.on_evicted(BlocksEvicted(A, (14, 13)), 0.0)
    assert matched(made) == 32


def test_what_is_missed_costs_the_less_of_computing_and_loading() -> None:
    made = scheduler()
    store(made)
    assert candidates(made)[A].prefill_s == pytest.approx(0.016)
    made.on_evicted(BlocksDemoted(A, (14, 13, 12, 11), Tier.HOST), 0.0)
    assert candidates(made)[A].prefill_s == pytest.approx(0.016 + 64 * 0.0001)
    slow = scheduler(profile=replace(PROFILE, host_load_s_per_token=0.5))
    store(slow)
    slow.on_evicted(BlocksDemoted(A, (14, 13, 12, 11), Tier.HOST), 0.0)
    assert candidates(slow)[A].prefill_s == pytest.approx(0.080)


def test_a_profile_without_loads_charges_a_tenth_of_computing() -> None:
    model = CostModel(replace(PROFILE, host_load_s_per_token=None, store_load_s_per_token=None))
    assert model.load_s(Tier.HOST, 1000) == pytest.approx(0.1)
    assert model.load_s(Tier.STORE, 1000) == pytest.approx(0.5)


@pytest.mark.parametrize("policy", ["preble", "e2"])
def test_a_replica_that_can_load_a_prefix_is_preferred_to_one_that_must_compute_it(policy: str) -> None:
    made = scheduler(policy)
    store(made, B)
    made.on_evicted(BlocksDemoted(B, (14, 13, 12, 11), Tier.HOST), 0.0)
    assert place(made).replica_id == B


@pytest.mark.parametrize("policy", ["preble", "e2"])
def test_a_replica_that_has_a_prefix_in_memory_is_preferred_to_one_that_must_load_it(policy: str) -> None:
    made = scheduler(policy)
    store(made, A)
    store(made, B)
    made.on_evicted(BlocksDemoted(A, (14, 13, 12, 11), Tier.HOST), 0.0)
    assert place(made).replica_id == B


@pytest.mark.parametrize("policy", ["preble", "e2"])
def test_a_store_is_one_place_for_all_replicas_on_it(policy: str) -> None:
    made = scheduler(policy, store="shared")
    store(made, A)
    made.on_evicted(BlocksShared(A, (13, 14, 11, 12)), 0.0)
    assert matched(made, B) == 64
    seen = candidates(made)
    assert (seen[A].loaded_tokens, seen[B].loaded_tokens) == (0, 64)
    assert seen[B].matched_tokens == 64
    made.add_replica(ReplicaSpec(ReplicaId("late"), block_size=16, reports_events=True, store="shared"), 0.0)
    assert matched(made, ReplicaId("late")) == 64


def test_a_store_of_its_own_is_no_other_replica_s() -> None:
    made = scheduler()
    store(made)
    made.on_evicted(BlocksShared(A, HASHES), 0.0)
    made.on_evicted(BlocksEvicted(A, (14, 13, 12, 11)), 0.0)
    assert (matched(made, A), matched(made, B)) == (64, 0)


def test_a_replica_without_events_fills_the_store_that_it_shares() -> None:
    made = scheduler_of("e2", A, B, model=CostModel(PROFILE), block_size=16, store="shared")
    placement = made.place(Request.of("q", PROMPT), 0.0)
    other = B if placement.replica_id == A else A
    assert matched(made, other) == 0
    made.on_finish(RequestId("q"), 1, 0.0)
    assert matched(made, other) == 64


def test_what_is_in_a_store_ages_unless_it_is_announced_again() -> None:
    made = scheduler(store="shared")
    store(made)
    made.on_evicted(BlocksShared(A, HASHES), 0.0)
    made.on_evicted(BlocksEvicted(A, (14, 13, 12, 11)), 0.0)
    made.on_timer(90.0)
    assert matched(made, B) == 64
    store(made, A, 90.0)
    made.on_evicted(BlocksShared(A, HASHES), 90.0)
    made.on_evicted(BlocksEvicted(A, (14, 13, 12, 11)), 90.0)
    made.on_timer(180.0)
    assert matched(made, B) == 64
    made.on_timer(200.0)
    assert matched(made, B) == 0
    assert made.snapshot().num_index_tokens == 0


def test_an_answer_corrects_what_is_expected_of_a_store() -> None:
    made = scheduler(store="shared")
    store(made)
    made.on_evicted(BlocksShared(A, HASHES), 0.0)
    made.on_evicted(BlocksEvicted(A, (14, 13, 12, 11)), 0.0)
    placement = place(made)
    assert placement.matched_tokens == 64
    made.on_finish(RequestId("q"), 1, 1.0, cached_tokens=16)
    other = B if placement.replica_id == A else A
    assert matched(made, other) == 16


@pytest.mark.parametrize(("engine_only", "left"), [(True, 64), (False, 0)])
def test_what_is_on_the_host_survives_a_reset_of_the_engine_s_memory(engine_only: bool, left: int) -> None:
    made = scheduler()
    store(made)
    made.on_evicted(BlocksDemoted(A, (14, 13, 12, 11), Tier.HOST), 0.0)
    made.on_evicted(CacheCleared(A, engine_only=engine_only), 0.0)
    assert matched(made) == left


def test_a_shared_store_survives_its_replicas_and_their_own_places_do_not() -> None:
    made = scheduler(store="shared")
    store(made)
    made.on_evicted(BlocksShared(A, HASHES), 0.0)
    store(made, B)
    made.on_evicted(BlocksDemoted(B, (14, 13, 12, 11), Tier.HOST), 0.0)
    made.remove_replica(A, 0.0)
    made.remove_replica(B, 0.0)
    made.check()
    for replica_id in (ReplicaId("c"), A):
        made.add_replica(ReplicaSpec(replica_id, block_size=16, reports_events=True, store="shared"), 0.0)
    assert matched(made, A) == 64
    assert candidates(made)[A].loaded_tokens == 64


def test_a_replica_that_is_not_trusted_loads_nothing() -> None:
    made = scheduler(store="shared")
    store(made)
    made.on_evicted(BlocksShared(A, HASHES), 0.0)
    made.set_trust(B, False, 0.0)
    made.on_evicted(BlocksEvicted(A, (14, 13, 12, 11)), 0.0)
    seen = candidates(made)
    assert seen[A].loaded_tokens == 64
    assert B not in seen or (seen[B].matched_tokens, seen[B].loaded_tokens) == (0, 0)


def test_the_explanation_shows_what_is_loaded() -> None:
    made = scheduler("preble")
    store(made)
    made.on_evicted(BlocksDemoted(A, (14, 13), Tier.HOST), 0.0)
    recent = RecentDecisions(made.policy.name, limit=25)
    recent.on(PlacedAt(place(made), 1.0), Started(), 1.0)
    (decision,) = recent.latest(1)
    assert "to load" in explain(decision)
    assert any(line.split()[-8:-6] == ["64", "32"] for line in explain(decision).splitlines())


def test_random_events_leave_the_index_in_order() -> None:
    rng = Random(7)
    made = scheduler("preble", store="shared")
    prompts = [[rng.randrange(3) for _ in range(96)] for _ in range(12)]
    for step in range(3000):
        replica_id, prompt = rng.choice((A, B)), rng.choice(prompts)
        hashes = tuple(hash(tuple(prompt[: 16 * (i + 1)])) & 0xFFFF_FFFF for i in range(6))
        some = tuple(reversed(hashes[rng.randrange(6) :]))
        now = step / 10
        match rng.randrange(8):
            case 0 | 1:
                made.on_stored(BlocksStored(replica_id, hashes, None, pack_tokens(prompt), 16), now)
            case 2 | 3:
                made.on_evicted(BlocksDemoted(replica_id, some, Tier.HOST), now)
            case 4:
                made.on_evicted(BlocksEvicted(replica_id, some, rng.choice((None, Tier.HOST))), now)
            case 5:
                made.on_evicted(BlocksShared(replica_id, hashes), now)
            case 6:
                made.place(Request.of(str(step), prompt), now)
                made.on_finish(RequestId(str(step)), 1, now, cached_tokens=rng.choice((None, 0, 48)))
            case _:
                made.on_timer(now)
                if not rng.randrange(20):
                    made.on_evicted(CacheCleared(replica_id, engine_only=rng.random() < 0.5), now)
        if step % 20 == 0:
            made.check()


def test_what_computing_would_have_cost_stands_beside_loading() -> None:
    evicted, demoted = scheduler("preble"), scheduler("preble")
    for made in (evicted, demoted):
        store(made)
        made.on_timer(0.0)
    demoted.on_evicted(BlocksDemoted(A, (14, 13, 12, 11), Tier.HOST), 0.0)
    evicted.on_evicted(BlocksEvicted(A, (14, 13, 12, 11)), 0.0)
    loads = candidates(demoted)
    ways = loads[A].ways
    assert ways is not None and ways.loaded_s == loads[A].cost_s
    assert ways.computed_s == pytest.approx(candidates(evicted)[A].cost_s) and ways.computed_s > loads[A].cost_s
    assert loads[B].ways == Ways(loads[B].cost_s)
    assert candidates(evicted)[A].ways is None, "nothing is kept outside of any engine"
