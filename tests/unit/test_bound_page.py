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
    assert result.known == [row.told(name) for row in result.rows for name in row.broken]
    page, made = bound.PAGE.read_text(encoding="utf-8"), bound.values(result)
    assert made.keys() <= set(script("benchmarks/repro/page.py").names(page))
    assert bound.filled(page, made) == page, "fill it in: python benchmarks/repro/bound.py --draw"


def test_what_is_known_to_be_broken_must_not_get_worse() -> None:
    bound = script("benchmarks/repro/bound.py")
    result = msgspec.json.decode(bound.RESULT.read_bytes(), type=bound.Result)
    row = next(row for row in result.rows if row.broken)
    (name,) = row.broken
    assert row.is_known(name)
    worse = msgspec.structs.replace(row.ratios[name], mean=bound.KNOWN[row.case, name].limit + 0.01)
    assert not msgspec.structs.replace(row, ratios=row.ratios | {name: worse}).is_known(name)
