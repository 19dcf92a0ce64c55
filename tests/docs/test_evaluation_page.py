"""What the evaluation and decision 0008 show is that of the kept results; the search draws what it says."""

from __future__ import annotations

import re
from pathlib import Path

from support.scripts import script

ROOT = Path(__file__).parents[2]


def test_a_drawn_case_is_the_same_whenever_it_is_drawn_and_its_smaller_ones_can_be_played() -> None:
    search = script("benchmarks/repro/hard_cases.py")
    for number in range(20):
        case = search.drawn(number)
        assert case == search.drawn(number)
        for smaller in search._smaller(case):
            assert smaller != case
            smaller.config(seed=0)


def test_the_drawn_and_named_cases_on_the_page_are_of_todays_policy() -> None:
    search = script("benchmarks/repro/hard_cases.py")
    result = search.read_result(search.RESULT)
    assert len(result.drawn()) >= 30
    unseen = search.read_result(search.UNSEEN)
    assert not {one.case for one in result.drawn()} & {one.case for one in unseen.drawn()}
    assert result.policies() | unseen.policies() == {search.policy_digest()}, (
        "play them again: --draw, --seeds and --worst; then --page"
    )
    page = search.PAGE.read_text(encoding="utf-8")
    for name, table in search.tables(result).items():
        assert f"<!-- {name} -->" in page
        assert table in page, "fill it in: python benchmarks/repro/hard_cases.py --page"


def test_every_figure_of_the_page_is_there_and_no_other() -> None:
    page = (ROOT / "benchmarks" / "EVALUATION.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"evaluation/([\w-]+\.svg)\)", page))
    assert shown == {path.name for path in (ROOT / "benchmarks" / "evaluation").glob("*.svg")} != set()


def test_the_picture_of_gains_its_table_and_its_values_are_those_of_the_kept_result() -> None:
    gains, page = script("benchmarks/repro/gains.py"), script("benchmarks/repro/page.py")
    kept = gains.known_gains()
    made = gains.values(kept) | {"gains": page.markdown(gains.table(kept))}
    for path in gains.PAGES:
        text = path.read_text(encoding="utf-8")
        assert page.filled(text, made) == text, "fill it in: python benchmarks/repro/gains.py --draw"
    for name in gains.drawings(kept):
        drawn = (gains.FIGURES / name).read_text(encoding="utf-8")
        assert all(f">{gain.title}<" in drawn for gain in kept)


def test_the_tables_of_decision_0008_are_those_of_the_kept_results() -> None:
    steps = script("benchmarks/repro/policy_steps.py")
    page = steps.PAGE.read_text(encoding="utf-8")
    assert [page.count(f"| {name} |") for name in ("e2", "+ what is evicted", "sticky_until_saturated")] == [1, 1, 1]
    assert steps.filled(page) == page, "fill it in: python benchmarks/repro/policy_steps.py --draw"
