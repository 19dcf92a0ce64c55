"""What the policy `preble` charges for a copy depends on how busy a prefix keeps a replica, and on nothing else.

Requests come evenly and are answered at once. A prefill takes 1 ms a token.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.preble import Preble
from preble.core.types import ReplicaId, ReplicaSpec, Request
from support.by_hand import MODEL

PREFIX_TOKENS = 400
DURATION_S = 30.0


def price_of_a_copy(*, uses_per_s: float, prefixes: int, replicas: int, window_s: float) -> float:
    """P of the first prefix where it is not cached, after half a minute of requests for each prefix in turn."""
    made = GlobalScheduler(Preble(), MODEL, window_s=window_s)
    names = [ReplicaId(f"r{i}") for i in range(replicas)]
    for name in names:
        made.add_replica(ReplicaSpec(name, block_size=1), 0.0)
    count = round(DURATION_S * uses_per_s) * prefixes
    for i in range(count):
        prefix, now = i % prefixes, i * DURATION_S / count
        others = frozenset(names) - {names[prefix % replicas]}
        prompt = [prefix * 1000 + position for position in range(PREFIX_TOKENS)] + [10**6 + i] * 10
        request = Request.of(f"q{i}", prompt)
        made.place(Request(request.request_id, request.prompt, avoid=others), now)
        made.on_finish(request.request_id, 20, now)
    placement = made.place(Request.of("last", [*range(PREFIX_TOKENS), *[10**7] * 10]), DURATION_S)
    return max(candidate.prefill_s for candidate in placement.candidates)


@settings(max_examples=10, deadline=None)
@given(uses_per_s=st.sampled_from([0.5, 2.0, 10.0]), window_s=st.sampled_from([10.0, 20.0, 600.0]))
def test_the_window_changes_nothing(uses_per_s: float, window_s: float) -> None:
    common = {"uses_per_s": uses_per_s, "prefixes": 4, "replicas": 2}
    usual = price_of_a_copy(**common, window_s=30.0)
    assert price_of_a_copy(**common, window_s=window_s) == pytest.approx(usual, rel=0.05)


@settings(max_examples=10, deadline=None)
@given(uses_per_s=st.sampled_from([0.5, 2.0, 10.0]), times=st.integers(2, 5))
def test_more_prefixes_on_as_many_more_replicas_change_nothing(uses_per_s: float, times: int) -> None:
    small = price_of_a_copy(uses_per_s=uses_per_s, prefixes=2, replicas=2, window_s=30.0)
    large = price_of_a_copy(uses_per_s=uses_per_s, prefixes=2 * times, replicas=2 * times, window_s=30.0)
    assert large == pytest.approx(small, rel=0.05)


@settings(max_examples=10, deadline=None)
@given(uses_per_s=st.sampled_from([0.5, 2.0, 10.0]), times=st.integers(2, 10))
def test_more_prefixes_of_the_same_popularity_make_none_of_them_cheaper(uses_per_s: float, times: int) -> None:
    few = price_of_a_copy(uses_per_s=uses_per_s, prefixes=2, replicas=2, window_s=30.0)
    assert price_of_a_copy(uses_per_s=uses_per_s, prefixes=2 * times, replicas=2, window_s=30.0) >= few


def test_what_keeps_its_holder_busy_is_copied_for_a_fraction_of_its_prefill() -> None:
    calm, hot = (price_of_a_copy(uses_per_s=rate, prefixes=1, replicas=2, window_s=30.0) for rate in (5.0, 20.0))
    assert hot < 0.4 * calm
