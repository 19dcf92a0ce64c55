"""The tables, values and figures of docs/fidelity.md are those of the kept results."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from support.scripts import script

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


def test_the_values_of_the_page_are_those_of_the_kept_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = [script(f"benchmarks/repro/{name}.py") for name in ("fidelity", "backends")]
    made = script("benchmarks/repro/made_by.py").values()
    made = {f"value:policy-{name}": made[f"value:policy-{name}"] for name in ("fidelity", "backends")}
    made |= {name: text for one in shown for name, text in one.values(one.known_results()).items()}
    pages = script("benchmarks/repro/page.py")
    assert sorted(made) == sorted(name for name in pages.names(page) if ":" in name)
    assert pages.filled(page, made) == page, "fill it in: benchmarks/repro/fidelity.py --draw, backends.py --draw"


def test_no_request_of_the_kept_results_failed(shown: ModuleType) -> None:
    runs = shown.runs_of(shown.known_results())
    assert runs and all(run.measured.summary.errors == 0 for run in runs)


def test_the_figure_of_the_page_is_there(shown: ModuleType) -> None:
    figures = re.findall(r"\]\((fidelity/[\w-]+\.svg)\)", PAGE.read_text(encoding="utf-8"))
    assert str(shown.FIGURE.relative_to(PAGE.parent)) in figures and shown.FIGURE.is_file()


def test_what_the_simulator_says_is_what_it_says_today() -> None:
    """Of one comparison: the others are as deterministic."""
    fidelity = script("benchmarks/repro/fidelity.py")
    results = fidelity.known_results()[0]
    kept = results.comparisons[0]
    assert fidelity.compared(results, kept.policy, kept.rps, kept.measured) == kept
