"""The table of docs/concepts/splits.md is that of the kept results, and says what the page promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.scripts import script

PAGE = (Path(__file__).parents[2] / "docs" / "concepts" / "splits.md").read_text(encoding="utf-8")
LONG_ANSWERS = "nothing shared, 512 out"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return script("benchmarks/repro/splits.py")


def test_the_table_is_that_of_the_kept_results(benchmark: Any) -> None:
    assert f"<!-- splits -->\n{benchmark.table(benchmark.known())}\n<!-- end -->" in PAGE


def test_every_result_is_of_a_case_that_there_is(benchmark: Any) -> None:
    found = benchmark.known()
    assert {name for name, _, _ in found} == benchmark.CASES.keys()
    assert all(way in benchmark.ways(benchmark.CASES[name]) for name, way, _ in found)


def test_long_answers_to_prompts_that_share_nothing_gain(benchmark: Any) -> None:
    found = benchmark.known()
    seeds = [seed for name, way, seed in found if (name, way) == (LONG_ANSWERS, "split")]
    assert seeds
    best = benchmark.best_chunk(found, LONG_ANSWERS, seeds)
    for seed in seeds:
        split = found[LONG_ANSWERS, "split", seed]
        assert split.itl_p99_s <= 0.03 and split.ttft_p99_s <= 0.75
        assert split.e2e_mean_s <= 0.95 * found[LONG_ANSWERS, best, seed].e2e_mean_s


@pytest.mark.parametrize("name", ["tool use", "long documents"])
def test_what_is_mostly_cached_is_not_split(benchmark: Any, name: str) -> None:
    found = benchmark.known()
    seeds = [seed for case, way, seed in found if (case, way) == (name, "split")]
    assert seeds
    best = benchmark.best_chunk(found, name, seeds)
    for seed in seeds:
        split = found[name, "split", seed]
        assert split.split < 0.01 and split.e2e_mean_s <= 1.02 * found[name, best, seed].e2e_mean_s
