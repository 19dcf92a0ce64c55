"""Where a request with a target goes, what it can have, and what is learned from how predictions turn out."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from preble.core.placing.promises import Outcomes
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.view import Choice, ClusterView
from preble.core.types import NO_TARGET, Reason, Request, Target
from support.by_hand import DOC, A, B, C, scheduler_of

MS = 0.001
"""A prompt token takes a millisecond."""


def asking(
    name: str, prompt: list[int], now: float, ttft_s: float | None = None, tpot_s: float | None = None
) -> Request:
    request = Request.of(name, prompt)
    request.promise(Target(ttft_s, tpot_s), now)
    return request


class Follower:
    """Follows the cache, whatever waits there."""

    name = "follower"

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        return Choice(max(view.replicas, key=view.matched_on), Reason.POLICY, ())


def busy_holder(*, decodes: bool = False) -> GlobalScheduler:
    """A caches `DOC` and has 500 ms of prefill to do; B has nothing of both; it is idle or decodes an answer."""
    made = scheduler_of(Follower(), A, B)
    held = Request.of("held", DOC)
    held.avoid = frozenset({B})
    made.place(held, 0.0)
    made.on_first_token(held.request_id, 0.1)
    made.on_finish(held.request_id, 1, 0.2)
    waiting = Request.of("waiting", range(10_000, 10_500))
    waiting.avoid = frozenset({B})
    made.place(waiting, 1.0)
    if decodes:
        elsewhere = Request.of("elsewhere", [9])
        elsewhere.avoid = frozenset({A})
        made.place(elsewhere, 0.0)
        made.on_first_token(elsewhere.request_id, 0.1)
    return made


def test_a_target_asks_for_a_time_on_the_schedulers_clock() -> None:
    request = Request.of("r", [1])
    assert not request.has_target
    request.promise(NO_TARGET, 5.0)
    assert not request.has_target
    request.promise(Target(ttft_s=0.5), 5.0)
    assert (request.has_target, request.first_token_by, request.tpot_s) == (True, 5.5, inf)


@pytest.mark.parametrize(("ttft_s", "where"), [(None, A), (0.6, A), (0.4, B), (0.3, A)])
def test_a_request_leaves_its_cache_only_for_its_target_and_not_for_far_away(ttft_s: float | None, where: str) -> None:
    """Elsewhere its prompt takes 100 ms: within three tenths of 400 ms, and not of 300 ms."""
    assert busy_holder(decodes=True).place(asking("r", DOC, 1.0, ttft_s), 1.0).replica_id == where


def test_a_request_leaves_its_cache_for_an_idle_replica_however_far() -> None:
    request = asking("r", DOC, 1.0, 0.3)
    made = busy_holder()
    assert made.forecast(request, 1.0).refused_for_s(request, 1.0) == 0.0
    assert made.place(request, 1.0).replica_id == B


def test_where_no_replica_keeps_the_target_the_policy_chooses_among_all() -> None:
    assert busy_holder().place(asking("r", DOC, 1.0, 0.01), 1.0).replica_id == A


@pytest.mark.parametrize(("ttft_s", "best_s"), [(0.4, 0.1), (0.3, 0.5)])
def test_a_forecast_counts_only_replicas_that_placement_would_take(ttft_s: float, best_s: float) -> None:
    request = asking("r", DOC, 1.0, ttft_s)
    assert busy_holder(decodes=True).forecast(request, 1.0).ttft_s == pytest.approx(best_s, abs=5 * MS)


def test_a_forecast_says_what_can_be_had_at_best_and_changes_nothing() -> None:
    made = busy_holder()
    request = asking("r", list(range(20_000, 20_200)), 1.0, 0.25)
    forecast = made.forecast(request, 1.0)
    assert forecast.ttft_s == pytest.approx(200 * MS)
    assert forecast.prefill_s == pytest.approx(200 * MS)
    assert forecast.is_possible(request, 1.0)
    assert forecast.late_s(request, 1.0) == pytest.approx(-50 * MS)
    assert forecast.start_by(request) == pytest.approx(1.05)
    assert made.snapshot().num_in_flight == 1
    impossible = asking("i", list(range(20_000, 20_200)), 1.0, 0.1)
    assert not made.forecast(impossible, 1.0).is_possible(impossible, 1.0)


@pytest.mark.parametrize(
    ("ttft_s", "is_idle", "refused_for_s"),
    [(0.8, False, 0.0), (0.6, False, 0.1), (0.1, False, 0.5), (0.1, True, 0.0), (None, False, 0.0)],
)
def test_a_request_is_refused_until_its_target_can_be_kept_or_nothing_waits_where_it_never_can(
    ttft_s: float | None, is_idle: bool, refused_for_s: float
) -> None:
    """500 ms of prefill wait, its own takes 200 ms."""
    made = scheduler_of(Follower(), A)
    if not is_idle:
        made.place(Request.of("waiting", range(10_000, 10_500)), 1.0)
    request = asking("r", list(range(20_000, 20_200)), 1.0, ttft_s)
    assert made.forecast(request, 1.0).refused_for_s(request, 1.0) == pytest.approx(refused_for_s)


def test_a_pace_that_no_replica_has_is_no_reason_to_wait_for_what_waits() -> None:
    made = scheduler_of(Follower(), A)
    made.place(Request.of("waiting", range(10_000, 10_500)), 1.0)
    request = asking("r", DOC, 1.0, tpot_s=0.5 * made.cost_model.decode_iteration_s(1, 100))
    assert made.forecast(request, 1.0).refused_for_s(request, 1.0) == 0.0


def test_a_request_keeps_away_from_those_who_were_promised_a_pace() -> None:
    made = scheduler_of("preble", A, B)
    step_s = made.cost_model.decode_iteration_s(1, 100)
    promised = asking("promised", DOC, 0.0, tpot_s=1.5 * step_s)
    where = made.place(promised, 0.0).replica_id
    made.on_first_token("promised", 0.1)
    other = asking("other", DOC, 1.0, ttft_s=10.0)
    assert made.place(other, 1.0).replica_id != where, "its prefix is there, but it would slow `promised` down"
    made.on_finish("promised", 5, 2.0)
    made.on_finish("other", 5, 2.0)
    assert made.place(asking("later", DOC, 3.0, ttft_s=10.0), 3.0).replica_id in (A, B)


def test_a_pace_that_no_replica_has_now_is_late_and_one_that_none_has_alone_is_impossible() -> None:
    made = scheduler_of("preble", A)
    alone_s = made.cost_model.decode_iteration_s(1, 100)
    made.place(Request.of("other", range(50)), 0.0)
    late, impossible = (asking(str(share), DOC, 0.0, tpot_s=share * alone_s) for share in (1.1, 0.9))
    assert made.forecast(late, 0.0).is_possible(late, 0.0)
    assert made.forecast(late, 0.0).late_s(late, 0.0) > 0
    assert not made.forecast(impossible, 0.0).is_possible(impossible, 0.0)


def test_what_turns_out_later_than_predicted_is_promised_later() -> None:
    made = scheduler_of("preble", A, B, C)
    for number in range(64):
        now = 10.0 * number
        placement = made.place(Request.of(str(number), range(number * 1000, number * 1000 + 100)), now)
        assert placement.predicted_ttft_s == pytest.approx(100 * MS)
        made.on_first_token(placement.request_id, now + 0.3)
        made.on_finish(placement.request_id, 1, now + 1.0)
        known_s = placement.predicted_ttft_p98_s
        assert known_s is None if number < 32 else known_s == pytest.approx(300 * MS)
    request = asking("r", list(range(100_000, 100_100)), 1000.0, 1.0)
    assert made.forecast(request, 1000.0).ttft_s == pytest.approx(0.3, abs=0.01)


def test_what_comes_slower_than_predicted_is_promised_slower() -> None:
    made = scheduler_of("preble", A, B, C)
    step_s = made.cost_model.decode_iteration_s(1, 100)
    for number in range(64):
        now = 10.0 * number
        placement = made.place(Request.of(str(number), range(number * 1000, number * 1000 + 100)), now)
        assert placement.predicted_tpot_s == pytest.approx(step_s)
        made.on_first_token(placement.request_id, now + 0.1)
        made.on_finish(placement.request_id, 17, now + 0.1 + 16 * 3 * step_s)
        known_s = placement.predicted_tpot_p98_s
        assert known_s is None if number < 32 else known_s == pytest.approx(3 * step_s)


def test_neither_a_whole_answer_nor_a_short_one_tells_how_far_its_tokens_lie_apart() -> None:
    made = scheduler_of("preble", A)
    for number in range(64):
        now = 10.0 * number
        placement = made.place(Request.of(str(number), range(100)), now)
        if number % 2:
            made.on_first_token(placement.request_id, now + 0.1)
        made.on_finish(placement.request_id, 15 if number % 2 else 50, now + 1.0)
    assert made.place(Request.of("last", range(100)), 1000.0).predicted_tpot_p98_s is None


def test_an_excess_is_known_once_enough_outcomes_are() -> None:
    outcomes = Outcomes()
    for number in range(31):
        outcomes.note(1.0, 2.0 + number)
    assert (outcomes.are_enough, outcomes.excess_s) == (False, 0.0)
    outcomes.note(1.0, 33.0)
    assert (outcomes.are_enough, outcomes.excess_s) == (True, 32.0)


def test_the_excess_is_that_of_the_last_outcomes_sorted() -> None:
    outcomes, rng = Outcomes(), Random(0)
    actual_s = [rng.choice((1.0, 1.25, rng.random())) for _ in range(700)]
    for known, time_s in enumerate(actual_s, 1):
        outcomes.note(1.0, time_s)
        last = sorted(time_s - 1.0 for time_s in actual_s[max(known - 256, 0) : known])
        assert known < 32 or outcomes.excess_s == last[int(0.98 * len(last))]


def test_only_the_last_outcomes_count() -> None:
    outcomes = Outcomes()
    for _ in range(256):
        outcomes.note(1.0, 5.0)
    for _ in range(256):
        outcomes.note(1.0, 1.5)
    assert outcomes.excess_s == 0.5


def test_the_end_of_a_promise_is_forgotten_with_its_replica() -> None:
    made = scheduler_of("preble", A, B)
    where = made.place(asking("r", DOC, 0.0, tpot_s=1.0), 0.0).replica_id
    made.remove_replica(where, 1.0)
    assert made._promises._tpot_s == {}
