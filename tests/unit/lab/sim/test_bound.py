"""The bounds: worked by hand, and nothing in the simulator ever beats them."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.core.costs.model import CostProfile
from preble.core.policies.registry import policy_names
from preble.core.types import pack_tokens
from preble.errors import ConfigError
from preble.lab.sim import Failure, FailureKind, SimConfig, SimResult, simulate
from preble.lab.sim.bound import steady_rate
from preble.lab.workloads import Segment, Workload, WorkloadRequest
from support.scripts import script

module = script("benchmarks/repro/lower_bound.py")
lower_bound = module.lower_bound

# A token costs 1 ms to prefill; an iteration that decodes takes 10 ms or more.
PROFILE = CostProfile("unit", "made up", ((0, 0.0), (1000, 1.0)), 0.0, 0.01, 0.0, 0.0, 4096)
COMMON = tuple(range(160))
"""Ten blocks."""


def config(replicas: int = 1, **settings: object) -> SimConfig:
    return SimConfig(**({"profile": PROFILE, "replicas": replicas} | settings))  # type: ignore[arg-type]


def ask(
    name: str, token_ids: tuple[int, ...], output_tokens: int = 1, at: float | None = 0.0, **more: object
) -> WorkloadRequest:
    prompt = Segment(tokens=pack_tokens(token_ids))
    return WorkloadRequest(name, (prompt,), output_tokens, arrival_s=at, **more)  # type: ignore[arg-type]


def follow(name: str, parent: str, token_ids: tuple[int, ...], output_tokens: int = 1) -> WorkloadRequest:
    """A request that is sent a second after its parent's end."""
    return ask(name, token_ids, output_tokens, at=None, session="s", parent=parent, delay_s=1.0)


def own(num_tokens: int, seed: int) -> tuple[int, ...]:
    """Tokens that no other seed has."""
    return tuple(range(1000 * (seed + 1), 1000 * (seed + 1) + num_tokens))


def bound(*requests: WorkloadRequest, on: SimConfig | None = None) -> module.LowerBound:
    return lower_bound(Workload("test", requests), on or config())


# -- worked by hand ---------------------------------------------------------------------------------------------------


def test_a_lone_request_takes_its_prefill_and_an_iteration_a_token_which_the_simulator_reaches() -> None:
    asked = ask("a", own(100, 0), output_tokens=3, at=2.0)
    found = bound(asked)
    assert (found.ttft_mean_s, found.e2e_mean_s) == pytest.approx((0.1, 0.12))
    # Decodes are cheapest in a batch of ten and more, where they take no longer than as many prompt tokens.
    assert found.gpu_s == pytest.approx(0.1 + 2 * 0.001)
    reached = simulate(config(), Workload("test", (asked,))).records[0]
    assert (reached.ttft_s, reached.e2e_s) == pytest.approx((0.1, 0.12))


def test_what_was_asked_before_is_cached_in_whole_blocks() -> None:
    found = bound(ask("a", COMMON + own(8, 0)), ask("b", COMMON[:150] + own(50, 1), at=1.0))
    assert found.requests["a"].ttft_s == pytest.approx(0.168)
    assert found.requests["b"].ttft_s == pytest.approx(0.2 - 0.144)
    assert found.gpu_s == pytest.approx(0.16 + 0.008 + 0.05)


def test_the_last_token_is_always_computed() -> None:
    found = bound(ask("a", COMMON), ask("b", COMMON, at=1.0))
    assert found.requests["b"].ttft_s == pytest.approx(0.016)


def test_what_is_asked_later_helps_nobody_before() -> None:
    found = bound(ask("late", COMMON + own(40, 0), at=0.5), ask("early", COMMON))
    assert found.requests["early"].ttft_s == pytest.approx(0.16)
    assert found.requests["late"].ttft_s == pytest.approx(0.04)


def test_what_several_ask_in_one_instant_is_cached_for_none_but_computed_once() -> None:
    found = bound(ask("a", COMMON), ask("b", COMMON))
    assert [found.requests[name].ttft_s for name in "ab"] == pytest.approx([0.16, 0.16])
    assert found.gpu_s == pytest.approx(0.16)


def test_a_conversation_finds_its_own_turns_and_answers() -> None:
    question, answer, more = own(40, 0), own(25, 1), own(50, 2)
    found = bound(ask("a", question, output_tokens=25), follow("b", "a", question + answer + more))
    # Of the answer's 25 tokens 24 are computed: 64 tokens, four blocks.
    assert found.requests["b"].ttft_s == pytest.approx(0.051)
    assert found.gpu_s == pytest.approx(0.04 + 24 * 0.001 + 0.051)


def test_a_follower_may_be_sent_after_everybody_else_but_those_that_follow_it() -> None:
    later = ask("later", COMMON + own(16, 0), at=100.0)
    found = bound(ask("a", own(16, 1)), follow("b", "a", COMMON), follow("c", "b", COMMON + own(20, 2)), later)
    assert found.requests["b"].ttft_s == pytest.approx(0.016), "whoever comes at 100 s may have been before it"
    alone = bound(ask("a", own(16, 1)), follow("b", "a", COMMON), follow("c", "b", COMMON + own(20, 2)))
    assert alone.requests["b"].ttft_s == pytest.approx(0.16)


def test_the_earliest_time_of_a_follower_counts_its_parents_answer_and_its_thinking_time() -> None:
    """The parent answers from 0 to 0.1 s at the earliest; so the follower comes at 1.1 s."""
    turns = (ask("a", own(16, 1), output_tokens=11), follow("b", "a", COMMON))
    before, after = (bound(*turns, ask("x", COMMON + own(16, 3), at=at)).requests["x"] for at in (1.05, 1.15))
    assert (before.ttft_s, after.ttft_s) == pytest.approx((0.176, 0.016))


def test_a_prompt_over_the_batch_budget_pays_for_the_context_of_its_later_chunks() -> None:
    profile = CostProfile("u", "made up", ((0, 0.0), (1000, 1.0)), 1e-5, 0.01, 0.0, 0.0, 4096)
    found = bound(ask("a", own(300, 0)), on=config(profile=profile, max_batch_tokens=256, max_running=8))
    # 256 tokens after none, 44 after 256: more pairs than the bound counts, which is 44 tokens after 1 ... 44.
    assert found.ttft_mean_s == pytest.approx(0.3 + 1e-5 * 44 * 45 / 2)
    assert found.ttft_mean_s < 0.3 + 1e-5 * 44 * 256


def test_computing_again_counts_where_it_is_cheaper_than_attending_to_what_is_cached() -> None:
    dear = CostProfile("u", "made up", ((0, 0.0), (1000, 1.0)), 0.0, 0.01, 0.0, 0.0, 4096, 16, 1.0)
    found = bound(ask("a", COMMON), ask("b", COMMON + own(16, 0), at=9.0), on=config(profile=dear))
    assert found.requests["b"].ttft_s == pytest.approx(0.176)


def test_a_burst_has_to_queue_shortest_first() -> None:
    asked = [ask(f"q{i}", own(100 * (i + 1), i)) for i in range(3)]
    found = bound(*asked)
    assert found.ttft_mean_s == pytest.approx((0.1 + 0.3 + 0.6) / 3)
    assert bound(*asked, on=config(2)).ttft_mean_s == pytest.approx(0.2), "of two replicas none has to wait much"


def test_a_burst_does_not_queue_for_what_it_shares() -> None:
    """One of them computes it for all, in the same batch."""
    asked = [ask(f"q{i}", COMMON + own(16, i)) for i in range(5)]
    assert bound(*asked).ttft_mean_s == pytest.approx(0.176)
    reached = simulate(config(), Workload("test", tuple(asked))).summary.ttft
    assert reached is not None and reached.mean_s == pytest.approx(0.16 + 5 * 0.016)


def test_the_rate_is_what_the_replicas_can_do_together() -> None:
    asked = [ask(f"q{i}", COMMON + own(40, i), at=float(i)) for i in range(10)]
    found = bound(*asked, on=config(2))
    assert found.gpu_s == pytest.approx(0.16 + 10 * 0.04)
    assert found.requests_per_s == pytest.approx(2 * 10 / 0.56)


def test_a_replica_that_joins_counts() -> None:
    asked = ask("a", own(100, 0))
    joins = (Failure(1.0, FailureKind.ADDED, "r9"),)
    assert bound(asked, on=config(failures=joins)).requests_per_s == pytest.approx(2 * bound(asked).requests_per_s)


def test_what_no_replica_can_hold_is_left_out_with_all_that_waits_for_it() -> None:
    found = bound(ask("huge", own(900, 0), 4000), follow("never", "huge", own(10, 1)), ask("fine", own(10, 2)))
    assert list(found.requests) == ["fine"]


def test_where_nothing_can_be_played_there_is_no_bound() -> None:
    with pytest.raises(ConfigError, match="no request fits"):
        bound(ask("huge", own(900, 0), 4000))
    with pytest.raises(ConfigError, match="0 replicas"):
        bound(ask("a", own(10, 0)), on=config(0))


# -- what holds of every run ------------------------------------------------------------------------------------------


def some_profile(rng: Random) -> CostProfile:
    """Flat, concave and convex pieces; each coefficient may be zero."""
    points = [(0, rng.choice([0.0, 0.01, 0.03]))]
    for _ in range(rng.randint(1, 5)):
        tokens, seconds = points[-1]
        points.append((tokens + rng.randint(1, 300), seconds + rng.choice([0.0, 0.001, 0.02, 0.1])))

    def some(high: float) -> float:
        return rng.choice([0.0, rng.random() * high])

    capacity = rng.choice([640, 1504, 8000])
    return CostProfile(
        "any", "drawn", tuple(points), some(1e-5), 0.001 + some(0.03), some(1e-3), some(1e-4), capacity, 16, some(1e-4)
    )


def some_workload(rng: Random) -> Workload:
    """Prompts that begin alike, end alike or are the same; conversations; all at once or spread over some seconds."""
    roots = [tuple(rng.randrange(50) for _ in range(400)) for _ in range(3)]
    spread_s = rng.choice([0.0, 0.5, 5.0, 20.0])
    sessions = rng.choice([0.0, 0.4])
    asked: list[WorkloadRequest] = []
    prompts: list[tuple[int, ...]] = []
    for i in range(rng.choice([1, 5, 30])):
        parent = rng.randrange(i) if i and rng.random() < sessions else None
        root = prompts[parent if parent is not None else rng.randrange(i)] if i and rng.random() < 0.5 else None
        tail = tuple(rng.randrange(50) for _ in range(rng.choice([0, 1, 60])))
        prompts.append(((root or rng.choice(roots)[: rng.randint(1, 400)]) + tail)[:560])
        name, output_tokens = f"q{i}", rng.randint(1, 30)
        if parent is None:
            asked.append(ask(name, prompts[i], output_tokens, at=rng.choice([0.0, rng.random()]) * spread_s))
        else:
            asked.append(follow(name, f"q{parent}", prompts[i], output_tokens))
    return Workload("drawn", tuple(asked))


def some_config(rng: Random) -> SimConfig:
    joins = Failure(rng.random() * 5, FailureKind.ADDED, "r9")
    return config(
        rng.randint(1, 3),
        profile=some_profile(rng),
        policy=rng.choice(policy_names()),
        max_batch_tokens=rng.choice([64, 256, 2048]),
        max_running=rng.choice([2, 8, 64]),
        block_size=rng.choice([1, 4, 16]),
        dispatch_s=rng.choice([0.0, 0.05]),
        failures=rng.choice([(), (joins,)]),
        speeds=rng.choice([{}, {"r0": 0.5}, {"r0": 3.0}]),
    )


def assert_holds(found: module.LowerBound, result: SimResult) -> None:
    """Every number of the run is on the right side of the bound, but for rounding."""
    slack = 1e-9
    done = {record.request_id: record for record in result.records if record.ok}
    assert done.keys() == found.requests.keys()
    for name, least in found.requests.items():
        ttft_s, e2e_s = done[name].ttft_s, done[name].e2e_s
        assert ttft_s is not None and ttft_s >= least.ttft_s - slack
        assert e2e_s is not None and e2e_s >= least.e2e_s - slack
    summary = result.summary
    assert summary.ttft is not None and summary.ttft.mean_s >= found.ttft_mean_s - slack
    assert summary.e2e is not None and summary.e2e.mean_s >= found.e2e_mean_s - slack
    assert result.gpu_s >= found.gpu_s - slack
    assert summary.requests_per_s <= found.requests_per_s * (1 + slack)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_no_policy_beats_the_bound(seed: int) -> None:
    rng = Random(seed)
    workload, cluster = some_workload(rng), some_config(rng)
    assert_holds(lower_bound(workload, cluster), simulate(cluster, workload))


# -- for ever ---------------------------------------------------------------------------------------------------------


def uses_of(*prefixes: int, gap_s: float = 10.0) -> Workload:
    """One request every `gap_s`, each for one of some prefixes of 96 tokens, and 4 tokens of its own."""
    asked = (ask(f"q{i}", (*own(96, prefix), *own(4, 1000 + i)), at=gap_s * i) for i, prefix in enumerate(prefixes))
    return Workload("uses", tuple(asked))


def test_where_the_caches_hold_everything_only_what_is_new_is_computed() -> None:
    alone = steady_rate(uses_of(*[1] * 100), config(kv_tokens=10_000), patience_s=0.0)
    assert alone == pytest.approx(1000 / (4 + 96 / 100), rel=0.02)  # a token costs 1 ms


def test_where_they_hold_half_of_two_prefixes_every_other_use_is_computed_too() -> None:
    in_turn = uses_of(*[1, 2] * 200)
    small, large = (steady_rate(in_turn, config(kv_tokens=tokens), patience_s=0.0) for tokens in (112, 400))
    assert large == pytest.approx(1000 / 4, rel=0.15)
    assert small == pytest.approx(1000 / (4 + 96 * (1 - 112 / 192)), rel=0.05)


def test_a_popular_prefix_is_held_rather_than_one_that_is_asked_for_now_and_then() -> None:
    often = uses_of(*([1] * 9 + [2]) * 40)
    assert steady_rate(often, config(kv_tokens=112), patience_s=0.0) > 1000 / (4 + 96 / 8)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_no_policy_computes_less_than_the_bound_without_end(seed: int) -> None:
    rng = Random(seed)
    asked = uses_of(*(rng.randrange(6) for _ in range(120)), gap_s=rng.choice([0.2, 1.0]))
    cluster = config(rng.randint(1, 3), policy=rng.choice(policy_names()), kv_tokens=rng.choice([112, 208, 512]))
    run = simulate(cluster, asked)
    waited_s = max(record.e2e_s for record in run.records)
    most = steady_rate(asked, cluster, patience_s=waited_s)
    assert run.gpu_s >= len(asked.requests) * cluster.replicas / most - 1e-9
