"""docs/fidelity.md, held against the results that it shows."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.scripts import script

PAGE = Path(__file__).parents[2] / "docs" / "fidelity.md"


@pytest.fixture(scope="module", params=["fidelity", "backends"])
def shown(request: pytest.FixtureRequest) -> ModuleType:
    """A script that fills in the page."""
    return script(f"benchmarks/repro/{request.param}.py")


def test_the_tables_of_the_page_are_those_of_the_kept_results(shown: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    made = shown.tables(shown.known_results())
    assert made and all(page.count(f"<!-- {name} -->") == 1 for name in made)
    assert shown.filled(page, made) == page, f"fill it in: python benchmarks/repro/{shown.__name__}.py --draw"


def test_no_request_of_the_kept_results_failed(shown: ModuleType) -> None:
    runs = shown.runs_of(shown.known_results())
    assert runs and all(run.measured.summary.errors == 0 for run in runs)


def test_the_figure_of_the_page_is_there(shown: ModuleType) -> None:
    figures = re.findall(r"\]\((fidelity/[\w-]+\.svg)\)", PAGE.read_text(encoding="utf-8"))
    assert str(shown.FIGURE.relative_to(PAGE.parent)) in figures and shown.FIGURE.is_file()


def test_the_means_are_as_near_as_the_page_says() -> None:
    fidelity = script("benchmarks/repro/fidelity.py")
    measurements = fidelity.known_results()
    off = [
        abs(case.off("cores", what, "mean"))
        for policy in fidelity.POLICIES
        for case in fidelity.cases(measurements, policy)
        for what in ("TTFT", "E2E")
    ]
    said = re.search(r"within (\d+) % of what was measured in all (\d+) cases", PAGE.read_text(encoding="utf-8"))
    assert said is not None
    assert (math.ceil(100 * max(off)), len(off)) == (int(said[1]), int(said[2]))


def test_what_the_pages_say_of_single_measurements_of_the_p99_and_of_the_gain_is_what_was_found() -> None:
    fidelity = script("benchmarks/repro/fidelity.py")
    measurements = fidelity.known_results()
    page, evaluation = (" ".join(file.read_text("utf-8").split()) for file in (PAGE, PAGE.parent / "evaluation.md"))

    def off(number: str, kept: Any) -> list[float]:
        found = [case for policy in fidelity.POLICIES for case in fidelity.cases(kept, policy)]
        return [case.off("cores", what, number) for case in found for what in ("TTFT", "E2E")]

    singly = [one for measurement in measurements for one in off("mean", [measurement])]
    near = sum(abs(one) <= 0.15 for one in singly)
    assert f"{near} of {len(singly)} are within 15 % and one is {-100 * min(singly):.0f} % too low" in page
    lowest = f"by up to {-100 * min(off('p99', measurements)):.0f} %"
    assert lowest in page and lowest in evaluation

    def times(policy: str, kept: Any) -> list[float]:
        return [case.true_s(what, "mean") for case in fidelity.cases(kept, policy) for what in ("TTFT", "E2E")]

    first, second = ([one for policy in fidelity.POLICIES for one in times(policy, [kept])] for kept in measurements)
    apart = max(max(pair) / min(pair) - 1 for pair in zip(first, second, strict=True))
    assert f"is up to {100 * apart:.0f} % above the shorter" in page
    pairs = list(zip(*(fidelity.cases(measurements, policy) for policy in ("round_robin", "preble")), strict=True))
    measured = [f"{a.true_s('E2E', 'mean') / b.true_s('E2E', 'mean'):.2f}" for a, b in pairs]
    simulated = [f"{a.made_s('cores', 'E2E', 'mean') / b.made_s('cores', 'E2E', 'mean'):.2f}" for a, b in pairs]
    for gains in (measured, simulated):
        assert f"{', '.join(gains[:-1])} and {gains[-1]}" in page


def test_what_the_simulator_says_is_what_it_says_today() -> None:
    """Of one comparison: the others are as deterministic."""
    fidelity = script("benchmarks/repro/fidelity.py")
    results = fidelity.known_results()[0]
    kept = results.comparisons[0]
    assert fidelity.compared(results, kept.policy, kept.rps, kept.measured) == kept
