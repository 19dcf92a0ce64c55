"""What went wrong elsewhere and must not here: defects of the authors' published code (D), complaints of the users of
other routers (C). Each test would fail on the defect it is named after.

Covered by other tests: D1 in test_e2 (identical prompts), D7 in property/test_cost_model (monotone profiles), D11
in test_trace (a bad line ends with an error), D13 and D14 in tests/gateway (stock engines, failures, disconnects), C1
and C3 in test_e2 and test_rebalance (system prompt, burst), C12 in tests of the decision log.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter

import pytest

import preble
from preble.core.costs.model import CostModel, CostProfile
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import (
    BlocksEvicted,
    BlocksStored,
    CacheCleared,
    Reason,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    pack_tokens,
)
from support.by_hand import run_of, scheduler_of

# One token costs 1 ms to prefill; an output token 0.1 ms of the replica.
MODEL = CostModel(CostProfile("unit", "made up", ((0, 0.0), (1000, 1.0)), 0.0, 0.0, 0.0001, 0.0, 10_000))


def scheduler(count: int, **settings: object) -> GlobalScheduler:
    return scheduler_of("e2", *(f"r{i}" for i in range(count)), model=MODEL, settings=settings)


def serve(made: GlobalScheduler, request_id: str, prompt: list[int], now: float = 0.0, output: int = 1) -> ReplicaId:
    replica = made.place(Request.of(request_id, prompt), now).replica_id
    made.on_finish(RequestId(request_id), output, now)
    return replica


def test_d2_the_chosen_replica_is_the_one_with_the_prefix_also_after_others_have_gone() -> None:
    """The published code took the position among the holders for the replica."""
    made = scheduler(4)
    prompt = run_of(1, 100)
    for replica in ("r2", "r3"):
        made.place(Request.of(f"at {replica}", prompt), 0.0)
        made.move(RequestId(f"at {replica}"), ReplicaId(replica), 0.0)
    for replica in ("r0", "r1"):
        made.remove_replica(ReplicaId(replica), 0.0)
    placement = made.place(Request.of("q", [*prompt, 7]), 0.0)
    assert (placement.reason, placement.matched_tokens) == (Reason.EXPLOIT, 100)
    assert placement.replica_id in {"r2", "r3"}


def test_d3_a_failed_request_does_not_spoil_what_is_computed_from_others() -> None:
    made = scheduler(2)
    made.place(Request.of("fails", run_of(1, 50)), 0.0)
    made.on_finish(RequestId("fails"), 0, 0.0)
    serve(made, "works", run_of(2, 50), output=10)
    assert made.place(Request.of("next", run_of(3, 50)), 0.0).candidates
    made.check()


def test_d4_an_eviction_is_the_replica_s_that_reports_it() -> None:
    """The published code's sender always said 0."""
    names, prompt = ("r0", "r1"), run_of(1, 100)
    made = scheduler_of("e2", *names, settings={"report_grace_s": 0.0}, block_size=50, reports_events=True)
    for name in names:
        made.on_stored(BlocksStored(ReplicaId(name), (1, 2), None, pack_tokens(prompt), 50), 0.0)
    made.on_evicted(BlocksEvicted(ReplicaId("r1"), (2,)), 0.0)
    probe = Request.of("probe", [*prompt, 1])
    assert [made.matched_tokens(ReplicaId(name), probe) for name in ("r0", "r1")] == [100, 50]


def test_d5_one_off_requests_leave_nothing_behind() -> None:
    """The published tree had 301 nodes after 300 one-off requests over five hours."""
    made = scheduler_of("e2", "r0", model=MODEL, settings={"window_s": 180.0}, kv_capacity_tokens=1000)
    for i in range(300):
        serve(made, f"q{i}", run_of(i, 100), now=60.0 * i)
    assert made.snapshot().num_index_tokens <= 1000


def test_d6_a_request_that_outlives_the_window_ends_like_any_other() -> None:
    made = scheduler(1, window_s=10.0, belief_ttl_s=20.0)
    made.place(Request.of("slow", run_of(1, 100)), 0.0)
    made.on_timer(50.0)
    made.on_finish(RequestId("slow"), 5, 60.0)
    made.on_timer(100.0)
    assert (made.snapshot().num_in_flight, made.snapshot().num_index_tokens) == (0, 0)
    made.check()


def test_d8_what_a_replica_would_evict_does_not_depend_on_the_others() -> None:
    def eviction_cost(elsewhere: int) -> float:
        made = scheduler_of("e2", "a", "b", model=MODEL, kv_capacity_tokens=300)
        for i, name in enumerate(["a", "a", *["b"] * elsewhere]):
            made.place(Request.of(f"q{i}", run_of(i % 2, 100)), float(i))
            made.move(RequestId(f"q{i}"), ReplicaId(name), float(i))
            made.on_finish(RequestId(f"q{i}"), 1, float(i))
        placed = made.place(Request.of("new", run_of(9, 200)), 50.0)
        return next(c.eviction_s for c in placed.candidates if c.replica_id == "a")

    assert eviction_cost(elsewhere=0) == eviction_cost(elsewhere=5) > 0


def test_d9_every_module_imports() -> None:
    needs_an_engine = ("preble.integrations", "preble.__main__")
    names = [module.name for module in pkgutil.walk_packages(preble.__path__, "preble.")]
    for name in names:
        if not name.startswith(needs_an_engine):
            importlib.import_module(name)
    assert len(names) > 50


def test_d15_an_empty_prompt_is_placed() -> None:
    made = scheduler(2)
    placement = made.place(Request.of("empty", []), 0.0)
    made.on_finish(RequestId("empty"), 1, 1.0)
    assert placement.matched_tokens == 0
    made.check()


def test_c2_one_overloaded_replica_does_not_cost_the_others_their_affinity() -> None:
    """SGLang's router drops to shortest queue for everybody as soon as two queues differ too much."""
    made = scheduler(4)
    home = {i: serve(made, f"warm{i}", run_of(i, 1000)) for i in range(4)}
    assert len(set(home.values())) == 4
    for i in range(100):
        made.place(Request.of(f"hot{i}", run_of(0, 1000) + run_of(100 + i, 100)), 1.0)
    for i in range(1, 4):
        placement = made.place(Request.of(f"again{i}", run_of(i, 1000) + run_of(900 + i, 100)), 1.0)
        assert (placement.replica_id, placement.matched_tokens) == (home[i], 1000)


def test_c4_memory_stays_within_its_budget() -> None:
    budget = 100_000
    made = scheduler(4, index_budget_bytes=budget)
    for i in range(500):
        serve(made, f"q{i}", run_of(i, 500), now=i / 100)
        assert made.snapshot().num_index_bytes <= budget
    assert made.snapshot().num_unindexed == 0


def test_c4_at_the_budget_requests_are_still_placed() -> None:
    made = scheduler(4, index_budget_bytes=20_000)
    placed = Counter(made.place(Request.of(f"q{i}", run_of(i, 1000)), 0.0).replica_id for i in range(40))
    assert made.snapshot().num_index_bytes <= 20_000
    assert made.snapshot().num_unindexed > 0
    assert len(placed) == 4 and max(placed.values()) <= 11


@pytest.mark.parametrize("comes_back_as", ["cleared", "removed and added"])
def test_c9_a_restarted_replica_keeps_no_stale_holdings(comes_back_as: str) -> None:
    made = scheduler(2)
    prompt = run_of(1, 1000)
    home = serve(made, "first", prompt)
    if comes_back_as == "cleared":
        made.on_evicted(CacheCleared(home), 1.0)
    else:
        made.remove_replica(home, 1.0)
        made.add_replica(ReplicaSpec(home, block_size=1), 1.0)
    assert made.matched_tokens(home, Request.of("probe", [*prompt, 1])) == 0
    made.check()


def test_c9_a_new_replica_does_not_scatter_prefixes() -> None:
    made = scheduler(2)
    home = {i: serve(made, f"warm{i}", run_of(i, 1000), now=i / 10) for i in range(10)}
    made.add_replica(ReplicaSpec(ReplicaId("new"), block_size=1), 2.0)
    again = {i: serve(made, f"again{i}", run_of(i, 1000) + run_of(50 + i, 50), now=2.0 + i / 10) for i in range(10)}
    assert again == home


def test_c11_little_sharing_on_two_replicas_is_balanced_as_well_as_by_turns() -> None:
    """26 % of each prompt is shared: affinity must not cost balance."""
    made = scheduler(2)
    shared = run_of(0, 260)
    work: Counter[ReplicaId] = Counter()
    for i in range(200):
        placement = made.place(Request.of(f"q{i}", shared + run_of(i + 1, 740)), i / 2)
        work[placement.replica_id] += placement.num_prompt_tokens - placement.matched_tokens
        made.on_finish(RequestId(f"q{i}"), 10, i / 2)
    assert max(work.values()) <= 1.02 * min(work.values())
