"""How policies rank simulated and through the gateway: what is computed, and what docs/evaluation.md shows of it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from tests.support.scripts import script

from preble.lab.metrics import RequestRecord, summarize


@pytest.fixture(scope="module")
def case() -> ModuleType:
    return script("benchmarks/repro/gateway_ranking_case.py")


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return script("benchmarks/repro/gateway_ranking_page.py")


@pytest.fixture
def made(case: ModuleType) -> Any:
    """A policy with these mean latencies."""

    def run(policy: str, e2e_s: float) -> Any:
        record = RequestRecord(request_id="q", scheduled_s=0.0, sent_s=0.0, first_token_s=e2e_s / 2, end_s=e2e_s)
        return case.Run(case.WORKLOADS["video"], policy, summarize([record]))

    def pair(policy: str, *, measured: float, simulated: list[float]) -> Any:
        return case.Pair(policy, run(policy, measured), tuple(run(policy, e2e_s) for e2e_s in simulated))

    return pair


def test_the_rank_correlation_is_spearmans_of_the_median_simulation(made: Any, page: ModuleType) -> None:
    values = {"a": (1.0, 2.0), "b": (2.0, 1.0), "c": (30.0, 7.0), "d": (40.0, 90.0)}
    pairs = [made(name, simulated=[0.5, s, 99.0], measured=m) for name, (s, m) in values.items()]
    # 1 - 6 * sum of the squared differences of ranks (1 + 1) / (4 * (16 - 1))
    assert page.rank_correlation(pairs, page.E2E_MEAN) == pytest.approx(0.8)
    assert page.rank_correlation(pairs, page.TTFT_MEAN) == pytest.approx(0.8)


def test_equal_values_share_the_mean_of_their_ranks(page: ModuleType) -> None:
    assert page.ranks([0.3, 0.1, 0.2, 0.1]) == [4.0, 1.5, 3.0, 1.5]


def test_policies_whose_simulations_overlap_are_not_told_apart(made: Any, page: ModuleType) -> None:
    pairs = [
        made("a", simulated=[1.0, 1.4], measured=1.0),
        made("b", simulated=[1.3, 1.2], measured=0.8),
        made("c", simulated=[1.6, 1.5], measured=0.9),
    ]
    apart = page.told_apart(pairs, page.E2E_MEAN)
    assert [(fast.policy, slow.policy) for fast, slow in apart] == [("a", "c"), ("b", "c")]
    assert [(fast.policy, slow.policy) for fast, slow in page.swapped(pairs, page.E2E_MEAN)] == [("a", "c")]


def test_the_tables_of_the_page_are_those_of_the_kept_results(case: ModuleType, page: ModuleType) -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    tables = page.tables(case.known_results())
    assert tables and all(text.count(f"<!-- {name} -->") == 1 for name in tables)
    assert page.filled(text, tables) == text, "fill it in: python benchmarks/repro/gateway_ranking.py --draw"


def test_every_policy_was_measured_and_simulated_and_no_request_failed(case: ModuleType) -> None:
    results = case.known_results()
    for workload in case.WORKLOADS:
        pairs = results.pairs(workload)
        assert [pair.policy for pair in pairs] == list(case.POLICIES)
        runs = [run for pair in pairs for run in (pair.measured, *pair.simulated)]
        assert {(run.summary.requests, run.summary.errors) for run in runs} == {(case.WORKLOADS[workload].requests, 0)}


def test_no_pair_that_the_simulator_distinguishes_is_swapped(case: ModuleType, page: ModuleType) -> None:
    pairs = [case.known_results().pairs(workload) for workload in case.WORKLOADS]
    assert [page.swapped(of_workload, of) for of_workload in pairs for of in page.NUMBERS.values()] == [[]] * 8


def test_the_machine_was_not_busy_with_emulating(case: ModuleType) -> None:
    measured = [run for run in case.known_results().runs if run.cpu is not None]
    assert max(run.cpu.share for run in measured) < 0.6


def test_the_figure_of_the_page_is_there(page: ModuleType) -> None:
    assert f"]({page.FIGURE.relative_to(page.PAGE.parent)})" in page.PAGE.read_text(encoding="utf-8")
    assert page.FIGURE.is_file()
