"""The numbers and figures of docs/concepts/fairness.md are those of the kept results, and of core's own queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.scripts import script

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib", reason="the benchmarks draw with matplotlib (the extra `plot`)")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "fairness.md"
DECISION = ROOT / "docs" / "decisions" / "0007-empty-groups-leave-the-others-their-proportion.md"
REPLICAS = ["emulator", "vllm", "sglang"]


@pytest.fixture
def fairness() -> Any:
    return script("benchmarks/repro/fairness.py")


@pytest.fixture
def figures() -> Any:
    return script("benchmarks/repro/fairness_figures.py")


def rows(table: str) -> list[str]:
    """Without the header."""
    return [line for line in table.splitlines() if line.startswith("|")][2:]


def test_the_simulated_table_is_that_of_its_results(fairness: Any) -> None:
    shown = [point for point in fairness.POINTS if point.utilisation in (0.95, 1.0, 1.1)]
    wanted = rows(fairness.table(fairness.results_of("simulator"), shown))
    assert len(wanted) == 3 * len(shown) == 15
    assert [row for row in wanted if row not in PAGE.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("engine", REPLICAS)
def test_the_table_of_each_engine_is_that_of_its_results(fairness: Any, engine: str) -> None:
    results = fairness.results_of(engine)
    wanted = rows(fairness.table(results))
    assert len(wanted) == len(fairness.ARMS[engine]) >= 3
    assert [row for row in wanted if row not in PAGE.read_text(encoding="utf-8")] == []
    assert not any(run.errors for run in results.runs)
    assert all(run.hits.cached > 0.8 and run.misses.cached < 0.1 for run in results.runs), "hits hit, misses miss"


def test_the_decision_quotes_the_simulated_results(fairness: Any) -> None:
    """All but the rows of the form that it replaced."""
    results = fairness.results_of("simulator")
    page = DECISION.read_text(encoding="utf-8")
    for point in (fairness.Point(0.95, 0.5), fairness.Point(0.95, 0.2)):
        for row in rows(fairness.table(results, [point])):
            _, _, _, order, *times, _, mean, _, _ = (cell.strip() for cell in row.split("|"))
            if order != "lpm":
                assert f"| {' | '.join([*times, mean])} |" in page


def test_longest_prefix_first_makes_misses_wait_longest_in_every_round(fairness: Any) -> None:
    for engine in REPLICAS:
        results = fairness.results_of(engine)
        p99_s = {(run.seed, run.order): run.misses.ttft.p99_s for run in results.runs}
        for seed in {run.seed for run in results.runs}:
            assert p99_s[seed, "lpm"] > max(p99_s[seed, "fcfs"], p99_s[seed, "groups"])
    assert len(fairness.slowdowns()) == 14


def test_the_values_of_the_page_are_those_of_the_kept_results(fairness: Any) -> None:
    page, made = PAGE.read_text(encoding="utf-8"), fairness.values()
    assert sorted(made) == sorted(script("benchmarks/repro/page.py").names(page))
    assert fairness.filled(page, made) == page, "fill it in: python benchmarks/repro/fairness.py --draw"


def test_in_a_rush_longest_prefix_first_gives_misses_most_of_all_ttft(fairness: Any) -> None:
    rush = fairness.select(fairness.results_of("simulator"), "lpm", fairness.RUSH)
    assert fairness.mid(rush, lambda run: run.share_of_misses) > 0.75, "as sglang#31954 reports"


def test_every_order_was_asked_the_same(fairness: Any) -> None:
    for engine in fairness.ENGINES:
        results = fairness.results_of(engine)
        for run in results.runs:
            assert run.hits.requests + run.misses.requests + sum(run.errors.values()) == results.case.requests
        for seed in {run.seed for run in results.runs}:
            counts = {(run.point, run.misses.requests) for run in results.runs if run.seed == seed}
            assert len(counts) == len({point for point, _ in counts})


def test_the_drawn_example_is_what_the_page_says_of_it(figures: Any) -> None:
    served = figures.example_orders()
    groups = "".join(figures.ARRIVALS[number - 1] for number in served["groups"])
    assert groups == "hhhhhhhhhh" + "ppp" + "m" + "hhhhhhh" + "mmm"
    assert "".join(figures.ARRIVALS[number - 1] for number in served["lpm"]) == "h" * 17 + "ppp" + "mmmm"
    assert served["fcfs"] == list(range(1, 25))


def test_the_figures_are_there() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in ("example", "simulated", "replicas"):
        assert f"(fairness/{name}.svg)" in page
        assert (PAGE.parent / "fairness" / f"{name}.svg").stat().st_size > 10_000
