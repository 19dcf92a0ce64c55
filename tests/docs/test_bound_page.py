"""The bound of `preble` against least load, on the page and as measured."""

from __future__ import annotations

import msgspec

from support.scripts import script


def test_the_bound_holds_in_the_kept_result_and_the_page_reports_its_worst() -> None:
    bound = script("benchmarks/repro/bound.py")
    result = msgspec.json.decode(bound.RESULT.read_bytes(), type=bound.Result)
    assert (result.seeds, result.broken) == (bound.SEEDS, [])
    assert {(row.case, row.load) for row in result.rows} == {
        (case, load) for case in bound.CASES for load in bound.LOADS
    }
    beyond = {row.told(name) for row in result.rows for name in row.beyond}
    assert beyond == set(result.not_promised), "only the p99 of TTFT may be above the bound"
    page, made = bound.PAGE.read_text(encoding="utf-8"), bound.values(result)
    assert made.keys() <= set(script("benchmarks/repro/page.py").names(page))
    assert bound.filled(page, made) == page, "fill it in: python benchmarks/repro/bound.py --draw"


def test_the_p99_of_ttft_is_not_promised_and_e2e_is() -> None:
    bound = script("benchmarks/repro/bound.py")
    result = msgspec.json.decode(bound.RESULT.read_bytes(), type=bound.Result)
    row = result.rows[0]
    high = bound.BOUND + 0.01
    ratios = {name: msgspec.structs.replace(ratio, mean=high) for name, ratio in row.ratios.items()}
    worse = msgspec.structs.replace(row, ratios=ratios)
    assert [name for name in worse.beyond if name in bound.PROMISED] == ["E2E mean", "E2E p99", "asked / served"]
