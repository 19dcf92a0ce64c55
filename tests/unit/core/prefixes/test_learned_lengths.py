"""What was learned of answers' lengths goes from one scheduler to the next."""

from __future__ import annotations

from itertools import count

import pytest

from preble.core.costs.refit import RefitSettings
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.prefixes import learned_lengths as module
from preble.core.prefixes.radix_tree import expected_output_tokens
from preble.core.types import Learned, LearnedLength, Request, RequestId, pack_tokens
from support.by_hand import A, B, run_of, scheduler_of

LONG, SHORT = run_of(1, 50), run_of(2, 50)
NUMBERS = count()


def ask(
    made: GlobalScheduler, prefix: list[int], tokens: int, *, own: list[int] | None = None, now: float = 0.0
) -> None:
    """A question about the prefix, which is answered at once with so many tokens."""
    number = next(NUMBERS)
    request = Request(RequestId(f"q{number}"), pack_tokens([*prefix, *(own or [10**6 + number])]))
    made.place(request, now)
    made.on_first_token(request.request_id, now)
    made.on_finish(request.request_id, tokens, now)


def expected(made: GlobalScheduler, prefix: list[int], namespace: str = "") -> float:
    match = made._cluster.index.match(pack_tokens([*prefix, 0]), namespace)
    return expected_output_tokens(match.path, made._cluster.window.mean_answer_tokens)


def learned() -> Learned:
    """Of answers of 2,000 tokens to the one prefix, and of 10 to the other."""
    made = scheduler_of("preble", A, B)
    for _ in range(10):
        ask(made, LONG, 2000)
        ask(made, SHORT, 10)
    return made.learned()


def begun_with(what: Learned) -> GlobalScheduler:
    return scheduler_of("preble", A, B, settings={"learned": what})


def test_a_later_scheduler_expects_answers_as_long_as_the_earlier_one_saw() -> None:
    made = begun_with(learned())
    assert expected(made, run_of(3, 50)) == pytest.approx(1005), "of a prefix that is new: the mean of all"
    for prefix in (LONG, SHORT):
        ask(made, prefix, 1)
        ask(made, prefix, 1)  # the second one shows where the prefix ends
    assert expected(made, LONG) > 1500
    assert expected(made, SHORT) < 250
    cold = scheduler_of("preble", A, B)
    for prefix in (LONG, SHORT):
        ask(cold, prefix, 1)
        ask(cold, prefix, 1)
    assert expected(cold, LONG) == pytest.approx(expected(cold, SHORT)), "else this test shows nothing"


def test_a_prefix_is_recalled_where_the_later_tree_splits_after_its_end() -> None:
    made = begun_with(learned())
    ask(made, LONG, 1, own=[7, 8, 9, 1])
    ask(made, LONG, 1, own=[7, 8, 9, 2])
    assert expected(made, [*LONG, 7, 8, 9]) > 1500


def test_a_prefix_of_another_namespace_recalls_nothing() -> None:
    made = begun_with(learned())
    for number in range(2):
        request = Request(RequestId(f"other{number}"), pack_tokens([*LONG, number]), namespace="salted")
        made.place(request, 0.0)
        made.on_first_token(request.request_id, 0.0)
        made.on_finish(request.request_id, 1, 0.0)
    assert expected(made, LONG, "salted") < 1005


def test_what_has_not_come_again_within_an_hour_is_forgotten() -> None:
    made = begun_with(learned())
    ask(made, run_of(4, 50), 1)
    ask(made, run_of(4, 50), 1)
    late = module.RECALLED_FOR_S + 1.0
    ask(made, LONG, 1, now=late)
    ask(made, LONG, 1, now=late)
    assert expected(made, LONG) < 10


def test_prefixes_with_few_answers_are_left_out_and_no_more_than_the_most_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = scheduler_of("preble", A, B)
    for prefix in (run_of(seed, 50) for seed in range(5, 15)):
        for _ in range(8):
            ask(made, prefix, 20)
    for _ in range(3):
        ask(made, LONG, 20)
    assert {length.end for length in made.learned().lengths} == {50} and len(made.learned().lengths) == 10
    monkeypatch.setattr(module, "MOST_LENGTHS", 4)  # shipped: thousands of prefixes
    assert len(made.learned().lengths) == 4
    monkeypatch.setattr(module, "MOST_HASHED_BYTES", 2 * 50 * 4)  # shipped: millions of tokens
    assert len(made.learned().lengths) == 2


def test_no_prompt_can_be_read_in_what_was_learned() -> None:
    lengths = learned().lengths
    assert [length.end for length in lengths] == [50, 50]
    assert all(len(length.digest) == 32 for length in lengths), "a digest has one length, whatever it is of"


def test_senseless_lengths_do_no_harm() -> None:
    odd = learned().lengths[0]
    made = begun_with(Learned(1e9, -1.0, None, (LearnedLength(odd.digest, odd.end, -5.0, -1e30),)))
    ask(made, LONG, 1)
    ask(made, LONG, 1)
    assert 0 <= expected(made, LONG) <= 45
    made.check()


def test_the_correction_of_the_profile_is_carried_on_within_its_bounds() -> None:
    made = scheduler_of("preble", A, settings={"learned": Learned(1.5, 9.0), "refit": RefitSettings()})
    assert made.snapshot().cost_factors.prefill == 1.5
    assert made.learned().decode_factor == RefitSettings().max_factor
    assert made.cost_model.prefill_s(1000, 0) == pytest.approx(1.5)
    uncorrected = scheduler_of("preble", A, settings={"learned": Learned(1.5, 9.0)})
    assert uncorrected.cost_model.prefill_s(1000, 0) == pytest.approx(1.0)
