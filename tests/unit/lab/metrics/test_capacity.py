"""Capacity at an SLO, estimates over seeds, and balance: worked out by hand."""

from __future__ import annotations

import pytest

from preble.lab.metrics import RequestRecord, Summary, summarize
from preble.lab.metrics.capacity import Bound, Capacity, CapacitySlo, capacity
from preble.lab.metrics.estimates import estimate, student_t_975
from preble.lab.metrics.summary import load_imbalance

SLO = CapacitySlo(ttft_p99_s=2.0)


def run(ttft_s: float, e2e_s: float = 5.0, errors: int = 0) -> Summary:
    """A run whose requests all had these times."""
    good = RequestRecord(
        request_id="good", scheduled_s=0.0, sent_s=0.0, first_token_s=ttft_s, end_s=e2e_s, output_tokens=2
    )
    bad = RequestRecord(request_id="bad", scheduled_s=0.0, sent_s=0.0, end_s=1.0, error="replica lost")
    return summarize([good, *[bad] * errors])


def test_it_lies_where_the_line_between_the_last_that_holds_and_the_next_crosses_the_bound() -> None:
    # p99 goes from 1 s at 10/s to 5 s at 20/s: 2 s are a quarter of the way.
    assert capacity([(5.0, run(0.5)), (10.0, run(1.0)), (20.0, run(5.0))], SLO) == Capacity(12.5)


def test_a_rate_above_one_that_does_not_hold_counts_for_nothing() -> None:
    runs = [(40.0, run(0.1)), (20.0, run(3.0)), (10.0, run(1.0))]
    assert capacity(runs, SLO) == Capacity(15.0)


def test_the_bound_itself_is_kept() -> None:
    assert capacity([(10.0, run(2.0)), (20.0, run(4.0))], SLO) == Capacity(10.0)


def test_of_two_broken_bounds_the_earlier_crossing_counts() -> None:
    # TTFT crosses at a half of the way, the mean E2E at a tenth.
    slo = CapacitySlo(ttft_p99_s=2.0, e2e_mean_s=6.0)
    assert capacity([(10.0, run(1.0, 5.0)), (20.0, run(3.0, 15.0))], slo) == Capacity(11.0)


def test_an_unbroken_bound_does_not_pull_it_down() -> None:
    slo = CapacitySlo(ttft_p99_s=2.0, e2e_mean_s=60.0)
    assert capacity([(10.0, run(1.0, 5.0)), (20.0, run(3.0, 50.0))], slo) == Capacity(15.0)


def test_where_requests_fail_nothing_is_interpolated() -> None:
    assert capacity([(10.0, run(1.0)), (20.0, run(1.5, errors=1))], SLO) == Capacity(10.0)


def test_if_every_rate_holds_it_is_at_least_the_highest() -> None:
    found = capacity([(10.0, run(1.0)), (20.0, run(1.5))], SLO)
    assert (found, str(found)) == (Capacity(20.0, Bound.AT_LEAST), "≥ 20")


def test_if_no_rate_holds_it_is_below_the_lowest() -> None:
    found = capacity([(10.0, run(3.0)), (20.0, run(4.0))], SLO)
    assert (found, str(found)) == (Capacity(10.0, Bound.BELOW), "< 10")


def test_no_runs_have_no_capacity() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        capacity([], SLO)


def test_a_run_without_requests_keeps_no_slo() -> None:
    assert not SLO.is_met_by(summarize([]))


@pytest.mark.parametrize(("degrees", "t"), [(1, 12.7062), (2, 4.3027), (9, 2.2622), (30, 2.0423)])
def test_the_quantiles_of_student_are_those_of_the_tables(degrees: int, t: float) -> None:
    assert student_t_975(degrees) == t


@pytest.mark.parametrize(("degrees", "t"), [(31, 2.0395), (40, 2.0211), (60, 2.0003), (120, 1.9799), (10**6, 1.9600)])
def test_beyond_the_table_the_expansion_is_as_good(degrees: int, t: float) -> None:
    assert student_t_975(degrees) == pytest.approx(t, abs=5e-5)


def test_an_interval_is_t_times_the_error_of_the_mean() -> None:
    # Deviations -3, 1, 2 from 10: s = √7, and t(2) = 4.3027.
    found = estimate([7.0, 11.0, 12.0])
    assert (found.mean, found.num) == (10.0, 3)
    assert found.half_width == pytest.approx(4.3027 * (7 / 3) ** 0.5)
    assert (found.low, found.high) == (10.0 - found.half_width, 10.0 + found.half_width)


def test_one_run_has_no_interval() -> None:
    found = estimate([7.0])
    assert (found.half_width, found.low, found.high) == (None, 7.0, 7.0)


def test_nothing_has_no_estimate() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        estimate([])


@pytest.mark.parametrize(
    ("busy_s", "imbalance"), [([4.0, 0.0], 2.0), ([2.0, 2.0], 1.0), ([0.0, 0.0], None), ([], None)]
)
def test_imbalance_is_the_busiest_against_the_average(busy_s: list[float], imbalance: float | None) -> None:
    assert load_imbalance(busy_s) == imbalance
