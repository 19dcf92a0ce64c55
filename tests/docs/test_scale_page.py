"""What several gateways cost: the kept result meets the bars, and the page shows it."""

from __future__ import annotations

import pytest

from support.scripts import script


def test_the_page_shows_the_kept_result() -> None:
    gateways = script("benchmarks/repro/gateways.py")
    page = gateways.PAGE.read_text(encoding="utf-8")
    made = gateways.drawn(gateways.read())
    assert made.keys() <= set(script("benchmarks/repro/page.py").names(page))
    assert gateways.filled(page, made) == page, "fill it in: python benchmarks/repro/gateways.py --draw"


@pytest.mark.parametrize("name", ["longdoc", "tool_use"])
def test_four_gateways_that_tell_each_other_within_50_ms_cost_no_more_than_the_bar(name: str) -> None:
    gateways = script("benchmarks/repro/gateways.py")
    runs = gateways.Runs(gateways.read())
    times = runs.times(name, 4, gateways.SOON, "ttft_mean_s")
    assert len(times) == len(gateways.SEEDS)
    assert sum(times) / len(times) <= gateways.CASES[name].bar
    assert not any(run.failed for told in gateways.FIRST for run in runs.of(name, 4, told))


def test_what_is_not_told_costs_several_times_as_much_with_long_documents() -> None:
    gateways = script("benchmarks/repro/gateways.py")
    never = gateways.Runs(gateways.read()).times("longdoc", 4, gateways.NEVER, "ttft_mean_s")
    assert min(never) > 3
