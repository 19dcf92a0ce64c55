"""docs/bursts.md and decision 0008: are those of the results."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from preble.lab.compare import CompareResult
from support.scripts import script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def evaluation() -> ModuleType:
    return script("benchmarks/repro/evaluation.py")


@pytest.fixture(scope="module")
def results(evaluation: ModuleType) -> dict[str, CompareResult]:
    found: dict[str, CompareResult] = evaluation.known_results()
    return found


def test_every_table_of_the_page_is_that_of_the_kept_results(
    evaluation: ModuleType, results: dict[str, CompareResult]
) -> None:
    page = evaluation.PAGE.read_text(encoding="utf-8")
    made = evaluation.tables(results)
    assert made.keys() <= {match["name"] for match in script("benchmarks/repro/page.py").MARKERS.finditer(page)}
    assert evaluation.NOT_RUN not in made.values()
    assert evaluation.filled(page, made) == page, "fill it in: python benchmarks/repro/evaluation.py --draw"


def test_the_details_are_those_of_the_kept_results(evaluation: ModuleType, results: dict[str, CompareResult]) -> None:
    written = {path.stem: path.read_text(encoding="utf-8") for path in evaluation.DETAILS.glob("*.md")}
    assert written == evaluation.details(results), "write them: python benchmarks/repro/evaluation.py --draw"


def test_every_case_has_a_result_of_the_plan_that_it_has_now_and_a_section(
    evaluation: ModuleType, results: dict[str, CompareResult]
) -> None:
    assert results.keys() == evaluation.CASES.keys()
    assert [name for name, case in evaluation.CASES.items() if results[name].plan != case.plan(Path("data"))] == []
    assert {path.stem for path in evaluation.RESULTS.glob("*.json")} == results.keys() | set(evaluation.EXTRAS)
    pages = "".join(evaluation.details(results).values())
    assert all(pages.count(f"\n`{name}`: ") == 1 for name in results)


def test_bounds_and_losses_are_of_the_cases_as_they_are_now(
    evaluation: ModuleType, results: dict[str, CompareResult]
) -> None:
    extras = script("benchmarks/repro/evaluation_extras.py")
    assert len(extras.known_bounds(results)) == len(extras.bound_cells(results)) > 6
    assert len(extras.known_losses()) == len(extras.loss_cells()) > 16


def test_no_policy_beats_a_bound(evaluation: ModuleType, results: dict[str, CompareResult]) -> None:
    extras, tables = script("benchmarks/repro/evaluation_extras.py"), script("benchmarks/repro/evaluation_tables.py")
    bounds = extras.known_bounds(results)
    assert bounds
    for bound in bounds:
        for policy in results[bound.case].plan.policies:
            run = next(
                run for run in results[bound.case].runs if (run.policy, run.workload) == (policy, bound.workload)
            )
            assert tables.TTFT_MEAN.of(run) >= bound.ttft_mean_s
            assert tables.E2E_MEAN.of(run) >= bound.e2e_mean_s


def test_the_seeds_of_the_page_are_others_than_those_that_the_policy_was_chosen_on(
    results: dict[str, CompareResult],
) -> None:
    assert results and all(min(result.plan.seeds) >= 10 for result in results.values())


def test_every_figure_of_the_pages_is_there_and_no_other(evaluation: ModuleType) -> None:
    pages = [evaluation.PAGE, evaluation.DOCS / "evaluation.md", *evaluation.DETAILS.glob("*.md")]
    shown = {figure for page in pages for figure in re.findall(r"evaluation/([\w-]+\.svg)\)", page.read_text("utf-8"))}
    assert shown == {path.name for path in evaluation.FIGURES.glob("*.svg")} != set()


def test_between_two_rates_the_logarithm_of_a_latency_is_straight(results: dict[str, CompareResult]) -> None:
    tables = script("benchmarks/repro/evaluation_tables.py")
    runs = results["toolbench"].runs_of("toolbench", "preble")
    low, high = list(runs)[:2]
    ends = [tables.at_rate(tables.E2E_MEAN, runs, rate) for rate in (low, high)]
    assert ends == [pytest.approx([tables.E2E_MEAN.of(run) for run in runs[rate]]) for rate in (low, high)]
    middle = tables.at_rate(tables.E2E_MEAN, runs, (low + high) / 2)
    assert middle == pytest.approx([(below * above) ** 0.5 for below, above in zip(*ends, strict=True)])
    assert tables.at_rate(tables.E2E_MEAN, runs, low / 2) == pytest.approx(ends[0])


def test_the_tables_of_decision_0008_are_those_of_the_kept_results() -> None:
    steps = script("benchmarks/repro/policy_steps.py")
    page = steps.PAGE.read_text(encoding="utf-8")
    assert [page.count(f"| {name} |") for name in ("e2", "+ what is evicted", "sticky_until_saturated")] == [1, 1, 1]
    assert steps.filled(page) == page, "fill it in: python benchmarks/repro/policy_steps.py --draw"
