"""The rules of other routers through the scheduler's door, on examples worked by hand.

Unless said otherwise a prefill takes 1 ms a token, blocks have one token, and prompts are made of runs that share
nothing, so that "40 of `doc`" is a match of 40 tokens wherever `doc` is held.
"""

from __future__ import annotations

from collections import Counter

import pytest

from preble.core.policies.baselines import PowerOfTwo, RandomChoice
from preble.core.policies.registry import make_policy, policy_names
from preble.core.policies.routers.aibrix import AibrixPreble
from preble.core.policies.routers.dynamo import DynamoKv
from preble.core.policies.routers.llmd import LlmdBlend, StickyUntilSaturated
from preble.core.policies.routers.lmetric import LMetric
from preble.core.policies.routers.ray import RayPrefix
from preble.core.types import Placement, Reason, ReplicaId
from support.by_hand import DOC, MODEL, OWN, A, B, C, Cluster, D, chosen, over_seeds, run_of, scores

BASELINES = [name for name in policy_names() if not name.startswith("e2")]


# what all have in common


@pytest.mark.parametrize("policy", BASELINES)
def test_the_only_replica_gets_everything(policy: str) -> None:
    made = Cluster(policy, A)
    for prompt in ([], DOC, DOC, [*DOC, 1], OWN):
        assert made.ask(prompt).replica_id == A
    made.scheduler.check()


@pytest.mark.parametrize("policy", BASELINES)
def test_a_prompt_shorter_than_a_block_matches_nothing(policy: str) -> None:
    made = Cluster(policy, A, B, block_size=16)
    made.hold(A, DOC[:15])
    placement = made.ask(DOC[:15])
    assert placement.matched_tokens == 0
    assert all(candidate.matched_tokens == 0 for candidate in placement.candidates)


@pytest.mark.parametrize("policy", [name for name in BASELINES if name not in ("round_robin", "chwbl")])
def test_replicas_that_are_equal_to_the_rule_are_drawn_by_lot(policy: str) -> None:
    assert over_seeds(lambda seed: Cluster(policy, A, B, C, D, seed=seed).ask(DOC)).keys() == {A, B, C, D}


@pytest.mark.parametrize("policy", BASELINES)
def test_a_replica_that_must_be_avoided_is_not_weighed(policy: str) -> None:
    made = Cluster(policy, A, B, C)
    made.hold(A, DOC)
    for _ in range(8):
        placement = made.ask(DOC, frozenset({A}))
        assert A not in {placement.replica_id, *scores(placement)}


@pytest.mark.parametrize("policy", BASELINES)
def test_every_policy_goes_by_the_name_it_is_made_by(policy: str) -> None:
    assert make_policy(policy).name == policy


# plain rules


def test_random_asks_nothing() -> None:
    made = Cluster(RandomChoice(), A, B)
    made.busy(A, 50)
    placed = Counter(made.ask(DOC).replica_id for _ in range(100))
    assert min(placed[A], placed[B]) > 30


def test_power_of_two_takes_the_less_busy_of_two() -> None:
    """Of three replicas the busiest loses against either of the others: it is never taken."""
    made = Cluster(PowerOfTwo(), A, B, C)
    made.busy(A, 50)
    made.busy(B, 20)
    placed = Counter(made.ask([i]).replica_id for i in range(30))
    # B is taken when the draw is A and B, a third of the time; B never gets up to A's 50, nor C up to B's 20 + x
    assert placed[A] == 0 and placed[B] > 0 and placed[C] > placed[B]


def test_power_of_two_says_what_it_compared() -> None:
    made = Cluster(PowerOfTwo(), A, B)
    made.busy(A, 3)
    assert scores(made.ask(DOC)) == {A: 3, B: 0}


# Dynamo


def test_dynamo_adds_prefill_and_decode_blocks() -> None:
    made = Cluster(DynamoKv(block_size=10), A, B)
    waits = made.put(A, DOC)
    prompt = DOC[:40] + OWN[:10]
    # A: 100 tokens wait and 10 are missed, 11 blocks; 100 in use and 10 new ones, 11 blocks. B: 50 missed, 50 in use
    placement = made.ask(prompt)
    assert chosen(placement) == (B, Reason.POLICY)
    assert scores(placement) == {A: 22, B: 10}
    made.forget(B, placement.request_id)
    made.scheduler.on_first_token(waits, 0.0)
    # nothing waits on A any more: 1 + 11 blocks
    placement = made.ask(prompt)
    assert chosen(placement) == (B, Reason.POLICY)
    assert scores(placement) == {A: 12, B: 10}
    made.forget(B, placement.request_id)
    made.finish(waits)
    # nothing is in use on A any more, but 40 tokens are cached: 1 + 5 blocks
    placement = made.ask(prompt)
    assert chosen(placement) == (A, Reason.POLICY)
    assert scores(placement) == {A: 6, B: 10}


def test_dynamo_weighs_prefill_by_its_overlap_weight() -> None:
    made = Cluster(DynamoKv(block_size=10, overlap_weight=2), A, B)
    made.decode(A, DOC)
    # A: 2 x 1 + 11, B: 2 x 5 + 5
    placement = made.ask(DOC[:40] + OWN[:10])
    assert scores(placement) == {A: 13, B: 15}
    assert placement.replica_id == A


def test_dynamo_draws_by_softmax_when_it_has_a_temperature() -> None:
    def arrange(seed: int) -> Placement:
        made = Cluster(DynamoKv(block_size=10, temperature=1.0), A, B, seed=seed)
        made.hold(A, DOC[:40])
        return made.ask(DOC[:40] + OWN[:10])

    assert scores(arrange(0)) == {A: 6, B: 10}
    # exp(-(10 - 6) / (10 - 6) / 1) = 0.368 to 1: B gets 0.269 of all
    assert over_seeds(arrange, 400)[B] / 400 == pytest.approx(0.269, abs=0.07)


# llm-d


def sticky(*names: ReplicaId) -> Cluster:
    """100 tokens wait one second; a second is what a request may wait longer for its cache. A caches 80 of `DOC`."""
    made = Cluster(StickyUntilSaturated(max_penalty_s=1.0, prefill_tokens_per_s=100.0), *names)
    made.hold(A, DOC[:80])
    return made


def test_sticky_stays_while_the_wait_is_bearable() -> None:
    made = sticky(A, B)
    made.put(A, run_of(3, 100))
    placement = made.ask(DOC)
    # 80 of 100 is enough; (100 - 0) / 100 = 1 s is not more than 1 s; of the sticky ones A alone is weighed
    assert chosen(placement) == (A, Reason.EXPLOIT)
    assert scores(placement) == {A: 100 + 20}


def test_sticky_lets_go_when_it_is_saturated() -> None:
    made = sticky(A, B)
    made.put(A, run_of(3, 101))
    placement = made.ask(DOC)
    # 1.01 s; A: 101 waiting + 20 missed, B: 100 missed
    assert chosen(placement) == (B, Reason.REDIRECT)
    assert scores(placement) == {A: 121, B: 100}


def test_sticky_may_stay_when_all_are_weighed() -> None:
    made = sticky(A, B)
    long = DOC[:80] + run_of(3, 15)
    made.hold(A, long + OWN)
    made.put(A, run_of(4, 101))
    placement = made.ask([*long, *OWN, 5])
    # A: 101 waiting + 1 missed, B: 196 missed
    assert chosen(placement) == (A, Reason.EXPLOIT)
    assert scores(placement) == {A: 102, B: 196}


def test_sticky_goes_by_token_load_if_too_little_matches() -> None:
    made = sticky(A, B)
    made.put(A, run_of(3, 90))
    placement = made.ask(DOC[:79] + OWN[:21])
    # 79 of 100; A: 90 waiting + 21 missed, B: 100 missed
    assert chosen(placement) == (B, Reason.EXPLORE)
    assert scores(placement) == {A: 111, B: 100}


def test_sticky_takes_the_lightest_of_several_that_match_enough() -> None:
    made = sticky(A, B, C)
    made.hold(B, DOC[:90])
    made.put(B, run_of(3, 15))
    placement = made.ask(DOC)
    # A: 20 missed; B: 15 waiting + 10 missed
    assert chosen(placement) == (A, Reason.EXPLOIT)
    assert scores(placement) == {A: 20, B: 25}


def test_llmd_blends_match_queue_and_kv_usage() -> None:
    made = Cluster(LlmdBlend(), A, B, C, kv_capacity_tokens=1000)
    made.hold(A, DOC[:60])
    made.put(A, run_of(3, 100))
    made.put(A, run_of(4, 100))
    made.put(B, run_of(5, 50))
    made.decode(C, run_of(6, 400))
    placement = made.ask(DOC)
    assert placement.reason is Reason.POLICY
    assert scores(placement) == pytest.approx(
        {
            A: -(1 + 3 * 0.6 + 2 * (2 - 2) / 2 + 2 * (1 - 0.2)),  # 60 of 100 match, 2 wait, 200 of 1000 in use: 3.4
            B: -(1 + 3 * 0.0 + 2 * (2 - 1) / 2 + 2 * (1 - 0.05)),  # 1 waits, 50 of 1000: 2.9
            C: -(1 + 3 * 0.0 + 2 * (2 - 0) / 2 + 2 * (1 - 0.4)),  # none waits, 400 of 1000: 3.2
        }
    )
    assert placement.replica_id == A


def test_llmd_gives_equal_queues_the_full_score_and_an_unknown_cache_no_usage() -> None:
    made = Cluster(LlmdBlend(prefix_weight=1, queue_weight=10, kv_weight=100), A, B)
    made.hold(B, DOC[:60])
    made.decode(B, run_of(3, 100))
    # no capacity is known: usage 0; nobody waits: 10 each
    placement = made.ask(DOC)
    assert scores(placement) == pytest.approx({A: -111.0, B: -111.6})
    assert placement.replica_id == B


def test_llmd_gives_a_cold_request_to_the_replica_that_got_one_longest_ago() -> None:
    made = Cluster(LlmdBlend(queue_weight=0, kv_weight=0), A, B, C)
    got = [made.ask(run_of(number, 40)).replica_id for number in range(10, 16)]
    assert set(got[:3]) == {A, B, C} and got[3:] == got[:3]
    made.hold(A, DOC)
    assert made.ask(DOC).replica_id == A, "a request that is not cold is spread by the other scores alone"
    assert made.ask(run_of(20, 40)).replica_id == got[0]


# Ray


def ray(*names: ReplicaId, seed: int = 0) -> Cluster:
    return Cluster(RayPrefix(imbalanced_threshold=2), *names, seed=seed)


def test_ray_falls_back_to_two_choices_when_queues_are_uneven() -> None:
    made = ray(A, B)
    made.hold(A, DOC)
    made.busy(A, 3)
    placement = made.ask(DOC)
    # 3 - 0 > 2
    assert chosen(placement) == (B, Reason.BALANCE)
    assert scores(placement) == {A: 3, B: 0}


def test_ray_follows_the_longest_match_while_queues_are_even() -> None:
    made = ray(A, B, C)
    made.hold(A, DOC)
    made.hold(B, DOC)
    made.busy(A, 2)
    made.busy(B, 1)
    placement = made.ask(DOC[:10] + OWN[:90])
    # 2 - 0 is not more than 2; 10 of 100 tokens are not less than 0.1; of the two that match B has fewer in flight
    assert chosen(placement) == (B, Reason.EXPLOIT)
    assert scores(placement) == {A: 2, B: 1}


def test_ray_sends_a_miss_to_the_emptiest_caches() -> None:
    made = ray(A, B, C)
    made.hold(A, DOC)
    made.hold(B, run_of(3, 50))
    made.hold(C, run_of(4, 49))
    made.busy(C, 1)
    placement = made.ask(DOC[:9] + OWN[:91])
    # 9 of 100; A holds 100 tokens, B 50, C 49 + 1: of those with 50 B has fewer in flight
    assert chosen(placement) == (B, Reason.EXPLORE)
    assert scores(placement) == {B: 0, C: 1}


# LMetric


def test_lmetric_multiplies_what_is_missed_by_the_batch() -> None:
    made = Cluster(LMetric(), A, B)
    made.hold(A, DOC[:80])
    made.busy(A, 2)
    placement = made.ask(DOC)
    # A: 20 x (2 + 1), B: 100 x (0 + 1)
    assert chosen(placement) == (A, Reason.POLICY)
    assert scores(placement) == {A: 60, B: 100}


def test_lmetric_leaves_the_cache_when_its_batch_is_too_large() -> None:
    def arrange(seed: int, busy: int) -> Placement:
        made = Cluster(LMetric(), A, B, seed=seed)
        made.hold(A, DOC[:80])
        made.busy(A, busy)
        return made.ask(DOC)

    # A: 20 x (5 + 1) = 120 against 100; with 4 it is 20 x 5 = 100, a tie
    assert arrange(0, 5).replica_id == B
    assert over_seeds(lambda seed: arrange(seed, 4)).keys() == {A, B}


# AIBrix


def test_aibrix_exploits_the_holder_with_the_fewest_requests_in_the_window() -> None:
    made = Cluster(AibrixPreble(), A, B, C)
    made.hold(A, DOC)
    made.hold(B, DOC)
    for request_id in made.busy(A, 2):
        made.finish(request_id)
    made.busy(B, 1)
    placement = made.ask(DOC)
    # A placed 1 + 2 in the window, all ended; B 1 + 1, one in flight
    assert chosen(placement) == (B, Reason.EXPLOIT)
    assert scores(placement) == {A: 3, B: 2}


def test_aibrix_explores_by_load_alone() -> None:
    made = Cluster(AibrixPreble(), A, B)
    made.put(A, DOC)
    made.put(B, run_of(3, 120))
    placement = made.ask(DOC[:50] + OWN[:50])
    # 50 of 100 is not more than 0.5. L: 0.100 s and 0.120 s of prefill, and one request's decode each, 45 tokens
    decode_s = MODEL.decode_s(45, 100)
    assert chosen(placement) == (A, Reason.EXPLORE)
    assert scores(placement) == pytest.approx({A: 0.100 + decode_s, B: 0.120 + decode_s})
    # 51 of 100 is
    assert chosen(made.ask(DOC[:51] + run_of(4, 49))) == (A, Reason.EXPLOIT)
