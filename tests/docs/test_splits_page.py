"""The table of docs/concepts/splits.md is that of the kept results, and says what the page promises."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from support.scripts import script

PAGE = (Path(__file__).parents[2] / "docs" / "concepts" / "splits.md").read_text(encoding="utf-8")
LONG_ANSWERS = "nothing shared, 512 out"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return script("benchmarks/repro/splits.py")


def test_the_table_is_that_of_the_kept_results(benchmark: Any) -> None:
    assert f"<!-- splits -->\n{benchmark.table(benchmark.KEPT.known())}\n<!-- end -->" in PAGE


def test_the_table_of_kills_is_that_of_the_kept_results_and_nothing_was_kept_two_leases_later() -> None:
    kills = script("benchmarks/repro/real_kills.py")
    found = kills.known()
    assert found
    assert f"<!-- real-kills -->\n{kills.table(found)}\n<!-- end -->" in PAGE
    for one in found:
        assert one.sources + one.targets and one.left and one.right > one.lost
        assert one.empty_after_s <= 2 * one.lease_s


def test_every_result_is_of_a_case_that_there_is(benchmark: Any) -> None:
    found = benchmark.KEPT.known()
    assert {name for name, _, _ in found} == benchmark.CASES.keys()
    assert all(way in benchmark.ways(benchmark.CASES[name]) for name, way, _ in found)


def test_long_answers_to_prompts_that_share_nothing_gain(benchmark: Any) -> None:
    split, best = benchmark.pairs(benchmark.KEPT.known(), LONG_ANSWERS, "split")
    assert len(split) == len(benchmark.SEEDS)
    assert fmean(one.itl_p99_s for one in split) <= 0.03
    assert fmean(one.ttft_p99_s for one in split) <= 0.75
    assert fmean(one.e2e_mean_s for one in split) <= 0.95 * fmean(one.e2e_mean_s for one in best)


@pytest.mark.parametrize(
    "name",
    [
        "tool use",
        "long documents",
        "programming",
        "video",
        "embodied agent",
        "nothing shared, 512 out, slow link",
    ],
)
def test_no_workload_is_slower_by_splits(benchmark: Any, name: str) -> None:
    split, best = benchmark.pairs(benchmark.KEPT.known(), name, "split")
    assert split
    for one, other in zip(split, best, strict=True):
        assert one.e2e_mean_s <= 1.02 * other.e2e_mean_s


@pytest.mark.parametrize("name", ["tool use", "long documents", "video", "embodied agent"])
def test_what_is_mostly_cached_is_not_split(benchmark: Any, name: str) -> None:
    split, _ = benchmark.pairs(benchmark.KEPT.known(), name, "split")
    assert split and all(one.split < 0.01 for one in split)
