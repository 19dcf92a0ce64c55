"""What docs/evaluation.md shows of the traces that were kept aside, compared with the kept results."""

from __future__ import annotations

from types import ModuleType

import pytest

from support.scripts import script


@pytest.fixture(scope="module")
def held_out() -> ModuleType:
    return script("benchmarks/repro/held_out.py")


def test_the_table_and_the_values_are_those_of_the_kept_results(held_out: ModuleType) -> None:
    tools = script("benchmarks/repro/page.py")
    results = held_out.known_results()
    made = {name: tools.markdown(table) for name, table in held_out.tables(results).items() if table is not None}
    page = held_out.PAGE.read_text(encoding="utf-8")
    assert {*made, *held_out.values(results)} <= {*tools.names(page)}
    assert tools.filled(page, made | held_out.values(results)) == page, "python benchmarks/repro/held_out.py --draw"


def test_every_result_is_of_a_case_that_there_is_and_of_its_plan(held_out: ModuleType) -> None:
    for name, result in held_out.known_results().items():
        plan = result.plan
        assert plan == held_out.CASES[name].plan(plan.policies, plan.seeds, plan.rates)
        assert plan.policies == held_out.POLICIES and plan.seeds == held_out.SEEDS[: len(plan.seeds)]


def test_runs_last_longer_than_the_policys_window(held_out: ModuleType) -> None:
    for result in held_out.known_results().values():
        lasted_s = [run.steady.lasted_s for run in result.runs if run.steady is not None]
        assert len(lasted_s) == len(result.runs) and min(lasted_s) > result.plan.cluster.window_s
