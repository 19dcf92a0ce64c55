"""docs/evaluation.md, held against the results that it shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def evaluation() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks" / "repro"))
    try:
        import evaluation as script
    finally:
        sys.path.pop(0)
    return script


def test_every_table_of_the_page_is_that_of_the_kept_results(evaluation: ModuleType) -> None:
    page = evaluation.PAGE.read_text(encoding="utf-8")
    made = evaluation.tables(evaluation.known_results())
    assert page.count("<!-- end -->") == len(evaluation.MARKERS.findall(page)) > 20
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
