"""The table of docs/concepts/copies.md is that of the kept results, and says what the page promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.scripts import script

PAGE = (Path(__file__).parents[2] / "docs" / "concepts" / "copies.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return script("benchmarks/repro/copies.py")


@pytest.fixture(scope="module")
def of_fleet() -> Any:
    return script("benchmarks/repro/drain_copies.py")


def test_the_table_is_that_of_the_kept_results(benchmark: Any) -> None:
    assert f"<!-- copies -->\n{benchmark.table(benchmark.KEPT.known())}\n<!-- end -->" in PAGE


def test_every_result_is_of_a_case_that_there_is(benchmark: Any) -> None:
    found = benchmark.KEPT.known()
    assert {name for name, _, _ in found} == benchmark.CASES.keys()
    assert all(link in (None, *benchmark.CASES[name].links) for name, link, _ in found)


def test_the_bound_on_video_is_that_of_the_kept_results_and_little_is_held_elsewhere() -> None:
    bound = script("benchmarks/repro/copies_bound.py")
    found = bound.KEPT.known()
    assert f"<!-- copies-bound -->\n{bound.table(found)}\n<!-- end -->" in PAGE
    assert {seed for _, seed in found} == set(bound.SEEDS)
    assert all(one.copied < 0.1 and one.elsewhere < 0.1 for one in found.values())


def test_the_70b_copies_nothing_over_a_slow_link(benchmark: Any) -> None:
    over_slow = [one for one in benchmark.KEPT.known().values() if one.link_gb_per_s == benchmark.SLOW]
    assert over_slow and not any(one.copies for one in over_slow)


def test_the_table_of_real_engines_is_that_of_the_kept_results_and_copies_are_in_place_of_computing() -> None:
    real = script("benchmarks/repro/real_copies.py")
    assert f"<!-- real-copies -->\n{real.table(real.known())}\n<!-- end -->" in PAGE
    without, copies = real.known()
    assert (without.way, copies.way) == real.WAYS
    assert without.failed == copies.failed == 0
    assert without.copied == 0 < copies.copied
    assert copies.computed < without.computed


def test_the_table_of_drains_is_that_of_the_kept_results(of_fleet: Any) -> None:
    assert f"<!-- drain-copies -->\n{of_fleet.table(of_fleet.KEPT.known())}\n<!-- end -->" in PAGE


def test_a_drained_replicas_sessions_compute_at_most_half_of_what_they_would_without_copies(of_fleet: Any) -> None:
    found = of_fleet.KEPT.known()
    drains = [name for name, case in of_fleet.CASES.items() if case.failures is of_fleet.DRAIN]
    assert len(drains) >= 3
    for name in drains:
        for seed in of_fleet.SEEDS:
            share, without = (
                found[name, copies, seed].computed / found[name, copies, seed].prompt for copies in (True, False)
            )
            assert share <= without / 2
