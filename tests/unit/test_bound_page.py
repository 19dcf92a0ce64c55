"""The bound of `preble` against least load, on the page and as measured."""

from __future__ import annotations

from pathlib import Path

import msgspec

from support.scripts import script

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "decisions" / "0008-the-policy-preble.md"


def test_the_bound_holds_in_the_kept_result_and_the_page_reports_its_worst() -> None:
    bound = script("benchmarks/repro/bound.py")
    result = msgspec.json.decode((ROOT / "benchmarks/results/bound.json").read_bytes(), type=bound.Result)
    assert (result.seeds, result.broken) == (bound.SEEDS, [])
    assert {(row.case, row.load) for row in result.rows} == {
        (case, load) for case in bound.CASES for load in bound.LOADS
    }
    assert result.known == [row.told(name) for row in result.rows for name in row.broken]
    worst = {
        name: max(row.ratios[name].mean for row in result.rows if name not in row.broken) for name in bound.NUMBERS
    }
    told = f"mean E2E {worst['E2E mean']:.3f}, p99 of E2E {worst['E2E p99']:.3f}, p99 of TTFT {worst['TTFT p99']:.3f}"
    assert f"<!-- bound -->{told}<!-- end -->" in PAGE.read_text(encoding="utf-8")
    for row in result.rows:
        for name in row.broken:
            assert f"{row.ratios[name].mean:.2f} at {row.load:.0%}".replace("%", " %") in PAGE.read_text(
                encoding="utf-8"
            )


def test_what_is_known_to_be_broken_must_not_get_worse() -> None:
    bound = script("benchmarks/repro/bound.py")
    result = msgspec.json.decode((ROOT / "benchmarks/results/bound.json").read_bytes(), type=bound.Result)
    row = next(row for row in result.rows if row.broken)
    (name,) = row.broken
    assert row.is_known(name)
    worse = msgspec.structs.replace(row.ratios[name], mean=bound.KNOWN[row.case, name].limit + 0.01)
    assert not msgspec.structs.replace(row, ratios=row.ratios | {name: worse}).is_known(name)
