"""What the demonstration concludes from its turns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from preble.lab.bench import BenchResult, BenchSettings
from preble.lab.bench.comparison import comparison, improvement, joined, too_busy
from preble.lab.bench.counters import CacheCounters
from preble.lab.metrics import RequestRecord, summarize
from preble.lab.workloads import WorkloadPlan

REPLICA = "http://127.0.0.1:1"


def turn(ttft_s: float, *, hits: int = 0, late_s: float = 0.001, requests: int = 2) -> BenchResult:
    """A turn of requests a second apart, each with a prompt of 100 tokens and this time to its first token."""
    records = [
        RequestRecord(
            request_id=str(second),
            scheduled_s=second,
            sent_s=second + late_s,
            first_token_s=second + ttft_s,
            end_s=second + ttft_s + 0.5,
            prompt_tokens=100,
            output_tokens=2,
            cached_tokens=hits,
        )
        for second in range(requests)
    ]
    return BenchResult(
        settings=BenchSettings(url="http://127.0.0.1:2", plan=WorkloadPlan(source="tool_use")),
        workload_note="",
        partial=False,
        summary=summarize(records, None),
        engines={REPLICA: CacheCounters(100 * requests, hits * requests)},
        records=records,
    )


def turns(*ttfts_s: float, hits: int = 0) -> Sequence[BenchResult]:
    return [turn(ttft_s, hits=hits) for ttft_s in ttfts_s]


def test_turns_that_agree_give_a_verdict() -> None:
    assert improvement(turns(0.1, 0.1, hits=50), turns(0.2, 0.4)) == (
        "50% fewer prompt tokens computed, mean TTFT 3.00 times better (2.00 and 4.00 in its turns)"
    )
    assert improvement(turns(0.4, 0.4), turns(0.2, 0.2)) == (
        "0% fewer prompt tokens computed, mean TTFT 0.50 times (that is, worse) (0.50 and 0.50 in its turns)"
    )


def test_turns_that_disagree_give_none() -> None:
    assert "mean TTFT without a verdict: 2.00 and 0.50 times as good" in improvement(turns(0.1, 0.4), turns(0.2, 0.2))


def test_a_turn_without_answers_is_compared_with_nothing() -> None:
    assert "nothing to compare" in improvement([turn(0.1, requests=0)], [turn(0.1)])


def test_joined_turns_follow_each_other_and_add_up() -> None:
    whole = joined([turn(0.1, hits=10), turn(0.3, hits=30)])
    assert whole.summary.requests == 4
    assert whole.summary.ttft is not None and whole.summary.ttft.mean_s == pytest.approx(0.2)
    assert whole.summary.duration_s == pytest.approx(1.6 + 1.8), "one turn after the other"
    assert whole.engines == {REPLICA: CacheCounters(400, 80)}
    shown = comparison("emulator", {"preble": [turn(0.1), turn(0.3)]})["policies"]["preble"]
    assert shown["ttft_mean_s_of_turns"] == [pytest.approx(0.1), pytest.approx(0.3)]


def test_a_load_generator_that_was_late_says_that_the_machine_was_busy() -> None:
    assert too_busy({"preble": [turn(0.1)]}) is None
    warning = too_busy({"preble": [turn(0.1), turn(0.1, late_s=0.08)]})
    assert warning is not None and "80 ms late" in warning
