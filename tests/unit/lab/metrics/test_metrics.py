from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preble.lab.metrics import RequestRecord, Slo, summarize
from preble.lab.metrics.summary import distribution, percentile


def record(request_id: str = "r", **changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "scheduled_s": 1.0,
        "sent_s": 1.0,
        "first_token_s": 1.5,
        "end_s": 2.5,
        "prompt_tokens": 100,
        "output_tokens": 5,
        "cached_tokens": 64,
        "replica": "a",
        "status": 200,
    }
    return RequestRecord(request_id=request_id, **fields | changes)


def failed(**changes: Any) -> RequestRecord:
    return record(**{"error": "engine_gone", "status": 502, "first_token_s": None, "end_s": 90.0} | changes)


def test_waiting_in_the_generator_counts_as_latency() -> None:
    late = record(scheduled_s=1.0, sent_s=3.0, first_token_s=3.5, end_s=4.0)
    assert (late.ttft_s, late.e2e_s, late.lag_s) == (2.5, 3.0, 2.0)


def test_one_output_token_has_no_time_per_output_token() -> None:
    assert record(output_tokens=1).tpot_s is None


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
    st.floats(0, 100),
)
def test_percentile_agrees_with_numpy(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_refuses_what_has_no_answer(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percentile needs values"):
        percentile(values, percent)


def test_no_values_have_no_distribution() -> None:
    assert distribution([]) is None


def test_failed_requests_count_as_errors_and_in_nothing_else() -> None:
    with_failure = summarize([record("a"), failed(request_id="b")])
    alone = summarize([record("a")])
    assert (with_failure.requests, with_failure.errors) == (2, 1)
    assert with_failure.errors_by_kind == {"engine_gone": 1}
    for name in ("ttft", "tpot", "e2e", "prompt_tokens", "hit_rate", "recomputed_tokens", "requests_per_replica"):
        assert getattr(with_failure, name) == getattr(alone, name), name


def test_hit_rate_leaves_out_requests_whose_engine_did_not_report() -> None:
    summary = summarize([record("a"), record("b", cached_tokens=None)])
    assert summary.hit_rate == 0.64


def test_tokens_are_summed() -> None:
    summary = summarize([record("a"), record("b", cached_tokens=0)])
    assert (summary.prompt_tokens, summary.output_tokens) == (200, 10)
    assert (summary.cached_tokens, summary.recomputed_tokens) == (64, 136)


def test_a_run_without_cache_reports_says_so() -> None:
    summary = summarize([record("a", cached_tokens=None)])
    assert (summary.cached_tokens, summary.recomputed_tokens, summary.hit_rate) == (None, None, None)


def test_the_run_lasts_from_the_first_scheduled_time_to_the_last_end() -> None:
    summary = summarize([record("a", scheduled_s=2.0), record("b", scheduled_s=0.5, sent_s=0.5, end_s=4.5)])
    assert summary.duration_s == 4.0
    assert summary.requests_per_s == 0.5


def test_goodput_counts_requests_within_the_slo() -> None:
    records = [record("a"), record("b", first_token_s=2.4), failed(request_id="c", end_s=2.5)]
    assert summarize(records, Slo(ttft_s=1.0)).goodput_per_s == pytest.approx(1 / 1.5)
    assert summarize(records).goodput_per_s is None


def test_an_empty_run_has_a_summary() -> None:
    summary = summarize([])
    assert (summary.requests, summary.errors, summary.requests_per_s, summary.ttft) == (0, 0, 0.0, None)


def test_requests_per_replica_are_counted() -> None:
    summary = summarize([record("a"), record("b", replica="b"), record("c", replica="a")])
    assert summary.requests_per_replica == {"a": 2, "b": 1}
