"""The rules of SGLang's routers, worked by hand; see test_routers.py."""

from __future__ import annotations

import pytest

from preble.core.policies.routers.sglang import SglangCacheAware, SlimRouter, SmgCacheAware
from preble.core.types import Placement, Reason, ReplicaId
from support.by_hand import DOC, OWN, A, B, C, Cluster, chosen, over_seeds, run_of, scores


def sglang(*names: ReplicaId, seed: int = 0, balance_rel: float = 1.5) -> Cluster:
    return Cluster(SglangCacheAware(balance_abs=2, balance_rel=balance_rel), *names, seed=seed)


def test_sglang_drops_affinity_for_all_when_load_is_uneven() -> None:
    made = sglang(A, B)
    made.hold(A, DOC)
    made.busy(A, 3)
    placement = made.ask(DOC)
    # 3 - 0 > 2 and 3 > 1.5 x 0
    assert chosen(placement) == (B, Reason.BALANCE)
    assert scores(placement) == {A: 3, B: 0}


def test_sglang_follows_the_cache_while_the_difference_is_small() -> None:
    made = sglang(A, B)
    made.hold(A, DOC)
    made.busy(A, 2)
    placement = made.ask(DOC)
    # 2 - 0 is not more than 2; 99 of 100 tokens match, the last one never does
    assert chosen(placement) == (A, Reason.EXPLOIT)
    assert scores(placement) == {A: 1, B: 100}


def test_sglang_follows_the_cache_while_the_ratio_is_small() -> None:
    made = sglang(A, B)
    made.hold(A, DOC)
    made.busy(A, 9)
    made.busy(B, 6)
    # 9 - 6 > 2, but 9 is not more than 1.5 x 6
    assert chosen(made.ask(DOC)) == (A, Reason.EXPLOIT)


def test_sglang_sends_a_miss_to_the_emptiest_cache_however_busy() -> None:
    made = sglang(A, B)
    made.hold(A, DOC)
    made.put(B, run_of(3, 60))
    placement = made.ask(DOC[:50] + OWN[:50])
    # 50 of 100 tokens match, which is not more than 0.5; A holds 100 tokens and is idle, B holds 60
    assert chosen(placement) == (B, Reason.EXPLORE)
    assert scores(placement) == {A: 100, B: 60}


def test_sglang_follows_a_match_just_over_the_threshold() -> None:
    made = sglang(A, B)
    made.hold(A, DOC)
    # 51 of 100
    assert chosen(made.ask(DOC[:51] + OWN[:49])) == (A, Reason.EXPLOIT)


def test_sglang_takes_any_of_those_that_match_longest() -> None:
    def arrange(seed: int) -> Placement:
        made = sglang(A, B, C, seed=seed)
        made.hold(A, DOC)
        made.hold(B, DOC)
        made.hold(C, DOC[:80])
        made.busy(A, 2)
        return made.ask(DOC)

    assert over_seeds(arrange).keys() == {A, B}


def smg(*names: ReplicaId, max_holders: int = 8) -> Cluster:
    return Cluster(SmgCacheAware(spill_abs=2, max_holders=max_holders), *names)


def test_smg_takes_the_least_busy_of_the_holders() -> None:
    made = smg(A, B, C)
    made.hold(A, DOC)
    made.hold(B, DOC)
    made.busy(A, 2)
    made.busy(B, 1)
    placement = made.ask(DOC)
    assert chosen(placement) == (B, Reason.EXPLOIT)
    assert scores(placement) == {A: 2, B: 1}


def test_smg_looks_at_no_more_holders_than_it_may() -> None:
    made = smg(A, B, C, max_holders=2)
    for name in (A, B, C):
        made.hold(name, DOC)
    made.busy(A, 2)
    made.busy(B, 1)
    assert scores(made.ask(DOC)) == {A: 2, B: 1}


def test_smg_sends_a_miss_to_the_least_busy() -> None:
    made = smg(A, B)
    made.hold(A, DOC)
    made.busy(A, 1)
    placement = made.ask(DOC[:30] + OWN[:70])
    # 30 of 100 tokens match, which is not more than 0.3
    assert chosen(placement) == (B, Reason.EXPLORE)
    assert scores(placement) == {A: 1, B: 0}
    # 31 of 100 are
    assert chosen(made.ask(DOC[:31] + run_of(3, 69))) == (A, Reason.EXPLOIT)


def test_smg_spills_one_request_and_the_target_becomes_a_holder() -> None:
    made = smg(A, B, C)
    made.hold(A, DOC)
    made.busy(A, 4)
    made.busy(C, 1)
    placement = made.ask(DOC)
    # mean 5/3: 4 > 1.5 x 5/3 and 4 > 5/3 + 2
    assert chosen(placement) == (B, Reason.REDIRECT)
    assert scores(placement) == {A: 4, B: 0, C: 1}
    # now both hold it; B has 1 in flight, C 1, A 4: B has the least of the holders
    assert scores(made.ask(DOC)) == {A: 4, B: 1}


@pytest.mark.parametrize(
    ("on_a", "on_b"),
    [
        (4, 0),  # mean 2: 4 > 1.5 x 2, but 4 is not more than 2 + 2
        (20, 10),  # mean 15: 20 > 15 + 2, but 20 is not more than 1.5 x 15
    ],
)
def test_smg_spills_only_if_both_bounds_are_passed(on_a: int, on_b: int) -> None:
    made = smg(A, B)
    made.hold(A, DOC)
    made.busy(A, on_a)
    made.busy(B, on_b)
    assert chosen(made.ask(DOC)) == (A, Reason.EXPLOIT)


def slim(*names: ReplicaId) -> Cluster:
    """A caches 50 of `DOC`, B 40; C nothing."""
    made = Cluster(SlimRouter(margin=10, pressure_abs=100, pressure_rel=1.5), *names)
    made.hold(A, DOC[:50])
    made.hold(B, DOC[:40])
    return made


def test_slim_router_takes_the_fewest_uncached_tokens() -> None:
    made = slim(A, B, C)
    made.put(A, run_of(3, 100))
    placement = made.ask(DOC)
    # A misses 50, B 60, C 100, which is more than 50 + 10; A's pressure of 100 is not more than 0 + 100
    assert chosen(placement) == (A, Reason.EXPLOIT)
    assert scores(placement) == {A: 50, B: 60}


def test_slim_router_vetoes_a_replica_under_pressure() -> None:
    made = slim(A, B, C)
    made.put(A, run_of(3, 101))
    placement = made.ask(DOC)
    # in the band A has 101 > 0 + 100 and > 1.5 x 0
    assert chosen(placement) == (B, Reason.REDIRECT)
    assert scores(placement) == {A: 50, B: 60}


@pytest.mark.parametrize(
    ("pressure", "outcome"),
    [
        (600, (A, Reason.EXPLOIT)),  # 600 > 400 + 100, but 600 is not more than 1.5 x 400
        (601, (B, Reason.REDIRECT)),
    ],
)
def test_slim_router_vetoes_only_by_difference_and_ratio(pressure: int, outcome: tuple[ReplicaId, Reason]) -> None:
    made = slim(A, B, C)
    made.put(A, run_of(3, pressure))
    made.put(B, run_of(4, 400))
    assert chosen(made.ask(DOC)) == outcome


def test_slim_router_cannot_veto_who_is_alone_in_the_band() -> None:
    made = slim(A, B, C)
    made.hold(A, DOC[:80])
    made.put(A, run_of(3, 5000))
    placement = made.ask(DOC)
    # A misses 20, B 60
    assert chosen(placement) == (A, Reason.EXPLOIT)
    assert scores(placement) == {A: 20}


def test_slim_router_goes_by_pressure_between_equals() -> None:
    made = slim(A, B, C)
    made.put(A, run_of(3, 20))
    made.put(B, run_of(4, 30))
    made.put(C, run_of(5, 10))
    placement = made.ask(OWN)
    assert chosen(placement) == (C, Reason.EXPLORE)
    assert scores(placement) == {A: 100, B: 100, C: 100}
