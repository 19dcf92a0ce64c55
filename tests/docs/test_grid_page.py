"""The map and the tables of docs/evaluation.md that tell of steady state, compared with the kept results."""

from __future__ import annotations

from types import ModuleType

import pytest

from preble.lab.compare import CompareResult
from preble.lab.metrics.capacity import Bound
from preble.lab.metrics.steady import Verdict
from support.scripts import script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def grid() -> ModuleType:
    return script("benchmarks/repro/grid.py")


@pytest.fixture(scope="module")
def results(grid: ModuleType) -> dict[str, CompareResult]:
    found: dict[str, CompareResult] = grid.known_results()
    return found


def test_every_table_and_the_map_are_those_of_the_kept_results(
    grid: ModuleType, results: dict[str, CompareResult]
) -> None:
    pages = script("benchmarks/repro/grid_page.py")
    tools = script("benchmarks/repro/page.py")
    made = {name: tools.markdown(table) for name, table in pages.tables(results).items() if table is not None}
    made |= pages.values(results)
    for path in tools.EVALUATION:
        text = path.read_text(encoding="utf-8")
        assert tools.filled(text, made) == text, "fill it in: python benchmarks/repro/grid.py --draw"
    drawn = grid.FIGURE.read_text(encoding="utf-8")
    assert all(f"{pages.lead(result):+.0%}" in drawn for name, result in results.items() if name.startswith("map"))


def test_every_result_is_of_a_cell_that_there_is_and_of_its_plan(
    grid: ModuleType, results: dict[str, CompareResult]
) -> None:
    assert {path.stem for path in grid.RESULTS.glob("*.json")} == results.keys() <= grid.CELLS.keys()
    for name, result in results.items():
        plan = result.plan
        assert plan == grid.CELLS[name].plan(plan.policies, plan.seeds, plan.loads)


def test_every_capacity_was_found_and_none_is_the_top_of_a_grid(results: dict[str, CompareResult]) -> None:
    searched = [result for result in results.values() if result.plan.is_search]
    assert searched
    assert all(one.bound is Bound.EXACT for result in searched for one in result.standings)


def test_what_is_carried_was_judged_in_steady_state(results: dict[str, CompareResult]) -> None:
    for result in results.values():
        for run in result.runs:
            assert run.steady is not None
            if run.is_carried(result.plan.slo):
                assert run.steady.verdict in (Verdict.STEADY, Verdict.WARMING)
                assert run.steady.lasted_s >= result.plan.cluster.window_s


def test_nobody_carries_more_than_is_possible_for_ever(grid: ModuleType, results: dict[str, CompareResult]) -> None:
    pages = script("benchmarks/repro/grid_page.py")
    bounds = {name: pages.bound_rps(grid.CELLS[name]) for name in results if name.startswith("map")}
    assert bounds
    for name, most in bounds.items():
        assert most is not None and max(pages.capacities(results[name]).values()) <= most, name


def test_the_seeds_are_others_than_those_that_the_policy_was_chosen_on(results: dict[str, CompareResult]) -> None:
    assert all(min(result.plan.seeds) >= 20 for result in results.values())
