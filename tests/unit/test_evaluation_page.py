"""docs/evaluation.md and decision 0008, held against the results that they show."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks" / "repro"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def evaluation() -> ModuleType:
    return script("evaluation")


def test_every_table_of_the_page_is_that_of_the_kept_results(evaluation: ModuleType) -> None:
    page = evaluation.PAGE.read_text(encoding="utf-8")
    made = evaluation.tables(evaluation.known_results())
    assert page.count("<!-- end -->") == len(script("page").MARKERS.findall(page)) > 20
    assert evaluation.filled(page, made) == page, "fill it in: python benchmarks/repro/evaluation.py --draw"


def test_every_kept_result_is_of_a_case_and_complete(evaluation: ModuleType) -> None:
    results = evaluation.known_results()
    assert results.keys() <= evaluation.CASES.keys()
    assert all(result.is_complete for result in results.values())
    assert {path.stem for path in evaluation.RESULTS.glob("*.json")} == results.keys()


def test_the_seeds_of_the_page_are_others_than_those_that_the_policy_was_chosen_on(evaluation: ModuleType) -> None:
    assert all(min(result.plan.seeds) >= 10 for result in evaluation.known_results().values())


def test_every_figure_of_the_page_is_there(evaluation: ModuleType) -> None:
    figures = re.findall(r"\]\((evaluation/[\w-]+\.svg)\)", evaluation.PAGE.read_text(encoding="utf-8"))
    assert figures and all((evaluation.PAGE.parent / figure).is_file() for figure in figures)


def test_the_tables_of_decision_0008_are_those_of_the_kept_results() -> None:
    steps = script("policy_steps")
    page = steps.PAGE.read_text(encoding="utf-8")
    assert page.count("| ttft_weight 1.5 |") == page.count("| e2 |") == 1
    assert steps.filled(page) == page, "fill it in: python benchmarks/repro/policy_steps.py --draw"
