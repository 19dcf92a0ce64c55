"""What is learned of a prefix: how often it is used, and how long its answers are."""

from __future__ import annotations

from math import exp

import pytest

from preble.core.cluster.state import Recomputation
from preble.core.prefixes.history import MEMORY_ANSWERS, MEMORY_S, PRIOR_ANSWERS, STREAK_S, PrefixHistory
from preble.core.prefixes.radix_tree import Node, RadixTree
from preble.core.types import Request, RequestId, pack_tokens
from support.by_hand import A, B, run_of, scheduler_of

DOC = run_of(1, 50)


def node_of(tree: RadixTree, tokens: list[int]) -> Node:
    return tree.match(pack_tokens(tokens)).last


def test_a_steady_use_is_its_rate_and_is_forgotten_when_it_ends() -> None:
    history = PrefixHistory(0.0)
    for i in range(1000):
        history.note_use(i * 0.1)
    assert history.uses_per_s(99.95) == pytest.approx(10.0, rel=0.02)
    assert history.uses_per_s(99.9 + 3 * MEMORY_S) == pytest.approx(exp(-3) * history.uses_per_s(99.9))


def test_a_burst_lets_expect_few_later_uses_and_a_steady_use_many() -> None:
    burst, steady = PrefixHistory(0.0), PrefixHistory(0.0)
    for i in range(40):
        burst.note_use(10.0 + i / 40)
        steady.note_use(i * 10 / 40)
    assert burst.later_uses(11.0, ready_s=6.0) < 1, "it lasted a second, and nobody knows how long it will"
    assert 14 < steady.later_uses(10.0, ready_s=6.0) < 23, "ten seconds of sixteen, squared"
    assert burst.later_uses(11.0, ready_s=0.1) > 32
    assert burst.later_uses(10.0 + 5 * STREAK_S, ready_s=6.0) < 1


def test_uses_of_one_moment_let_expect_no_later_ones() -> None:
    history = PrefixHistory(0.0)
    for _ in range(24):
        history.note_use(1.0)
    assert history.later_uses(1.0, ready_s=0.5) == 0.0


def test_few_answers_are_weighed_with_what_is_expected_without_them() -> None:
    history = PrefixHistory(0.0)
    assert history.expected_tokens(prior=45.0) == 45.0
    history.note_answer(1000)
    assert history.expected_tokens(prior=45.0) == pytest.approx((1000 + PRIOR_ANSWERS * 45) / (1 + PRIOR_ANSWERS))


def test_answers_that_change_are_followed() -> None:
    history = PrefixHistory(0.0)
    for tokens in [1000] * 500 + [10] * int(5 * MEMORY_ANSWERS):
        history.note_answer(tokens)
    assert history.expected_tokens(prior=10.0) == pytest.approx(10, abs=10)


def test_a_prefix_has_a_history_from_its_second_request_and_both_parts_of_a_split_keep_it() -> None:
    made = scheduler_of("round_robin", A)
    tree = made._cluster.index.tree
    for i in range(3):
        made.place(Request.of(f"q{i}", [*DOC, 1000 + i]), float(i))
    assert node_of(tree, DOC).history is not None
    assert node_of(tree, [*DOC, 1000]).history is None, "only one request has it"
    made.on_finish(RequestId("q2"), 100, 3.0)
    made.place(Request.of("half", [*DOC[:20], 7]), 3.0)
    upper, lower = node_of(tree, DOC[:20]), node_of(tree, DOC)
    assert upper is not lower
    assert upper.history is not None and lower.history is not None
    assert upper.history is not lower.history
    assert upper.history.expected_tokens(0.0) == lower.history.expected_tokens(0.0) > 0
    assert upper.history.uses_per_s(3.0) > lower.history.uses_per_s(3.0), "the last request uses only the upper part"


def test_a_prefix_that_is_joined_with_its_last_child_keeps_its_history() -> None:
    made = scheduler_of("round_robin", A, B)
    made.place(Request.of("short", [*DOC, 1]), 0.0)
    made.place(Request.of("long", [*DOC, 2]), 0.0)
    made.on_finish(RequestId("long"), 100, 1.0)
    made.on_finish(RequestId("short"), 0, 1.0)  # its work was not done
    tree = made._cluster.index.tree
    history = node_of(tree, [*DOC, 2]).history
    assert tree.num_nodes == 1
    assert history is not None and history.expected_tokens(0.0) > 0
    made.check()


def test_the_share_computed_again_forgets_as_the_caches_do() -> None:
    recomputation = Recomputation()
    assert recomputation.share == 0.0
    recomputation.note(100.0, 0, 1000.0)
    recomputation.note(100.0, 100, 1000.0)
    assert recomputation.share == pytest.approx(100 / (100 * exp(-0.1) + 100))
    for _ in range(100):
        recomputation.note(100.0, 25, 1000.0)
    assert recomputation.share == pytest.approx(0.25, abs=1e-3)


def test_what_is_taken_back_of_a_running_answer_leaves_no_length_below_zero() -> None:
    history = PrefixHistory(0.0)
    history.note_running(1_000.0)
    for _ in range(100):
        history.note_answer(1.0)
    history.note_running(-1_000.0)
    assert history.expected_tokens(10.0) >= 0
