"""What the evaluation and decision 0008 show is that of the kept results; the search draws what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

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


def test_each_rule_says_what_it_makes_of_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    search = script("benchmarks/repro/hard_cases.py")
    case = msgspec.structs.replace(search.NAMED["burst-40x6000"], lasting_s=16.0)
    monkeypatch.setattr(search, "NAMED", {"short": case})  # all the named cases
    monkeypatch.setattr(search, "RULES", ("preble", "least_load"))  # every rule
    title, *lines = search.by_stream("short", 0).splitlines()
    assert title.startswith("short, seed 0")
    assert [line.split()[0] for line in lines] == ["preble", "least_load"]
    assert all("tools " in line and "document at 15 s " in line for line in lines)


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


def test_a_closer_look_keeps_each_case_at_once_and_then_plays_preble_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each case `preble` takes 4 s and the others 2 s; after a change of the policy it takes 3 s."""
    search, path, played = script("benchmarks/repro/hard_cases.py"), tmp_path / "kept.json", []
    own_s = 4.0

    def play(_case: Any, _workload: Any, policy: Any, seed: int, _means: Any) -> Any:
        played.append((policy.name, seed))
        seconds = {"": own_s if policy.name == "preble" else 2.0}
        return search.Numbers(seconds, seconds, seconds, 0)

    monkeypatch.setattr(search, "play", play)
    monkeypatch.setattr(search, "policy_digest", lambda: f"policy of {own_s}")
    cases = ("burst-40x6000", "hot-prefix")
    monkeypatch.setattr(search, "case_of", search.NAMED.__getitem__)
    monkeypatch.setattr(search.Result, "drawn", lambda result: result.outcomes)

    def look() -> dict[str, Any]:
        outcomes = [search.outcome(name, search.NAMED[name], seed=7) for name in cases]
        search._write(search.Result(outcomes=outcomes, worst=search.read_result(path).worst), path)
        played.clear()
        search.closer(path)
        return {one.case: one for one in search.read_result(path).worst}

    first = look()
    assert {name: (one.ratios, one.best_s) for name, one in first.items()} == dict.fromkeys(
        cases, ([2.0] * 4, [2.0] * 4)
    )
    assert {name for name, seed in played if seed == 3007} == set(search.RULES)
    search.closer(path)
    assert played.count(("preble", 3007)) == len(cases), "what today's policy has played is not played again"

    own_s = 3.0
    monkeypatch.setattr(search, "_closer", breaking := _Breaking(search._closer))
    with pytest.raises(KeyboardInterrupt):
        look()
    kept = {one.case: one.policy for one in search.read_result(path).worst}
    assert kept == {cases[0]: "policy of 3.0", cases[1]: "policy of 4.0"}
    breaking.after = len(cases)
    second = look()
    assert {name: one.ratios for name, one in second.items()} == dict.fromkeys(cases, [1.5] * 4)
    assert [seed for name, seed in played if name == "preble"][:3] == [1007, 2007, 3007]
    assert {name for name, _ in played} == {"preble", second[cases[1]].best}, "one rule, to shrink what is lost"


def test_a_drawn_case_plays_again_against_the_rule_that_was_best_when_it_was_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search, played = script("benchmarks/repro/hard_cases.py"), []
    seconds = {"preble": 3.0, "lmetric": 2.0}

    def play(_case: Any, _workload: Any, policy: Any, seed: int, _means: Any) -> Any:
        played.append((policy.name, seed))
        means = {"": seconds[policy.name]}
        return search.Numbers(means, means, means, 0)

    monkeypatch.setattr(search, "play", play)
    by_rule = {rule: search.Numbers({"": value}, {"": 1.0}, {"": 1.0}, 0) for rule, value in seconds.items()}
    drawn = search.Outcome(case="drawn-7", seed=7, policy="before", by_rule=by_rule)
    first = search._again(drawn, None)
    assert (first.best, first.ratio(), played) == (
        "lmetric",
        1.5,
        [(rule, seed) for seed in (1007, 2007) for rule in ("preble", "lmetric")],
    )
    seconds["preble"] = 1.0
    played.clear()
    assert search._again(drawn, first).ratio() == 0.5
    assert played == [("preble", 1007), ("preble", 2007)], "the rule is as it was"


class _Breaking:
    """Calls as often as it may, then is interrupted as by Ctrl-C."""

    def __init__(self, call: Any) -> None:
        self._call, self.after = call, 1

    def __call__(self, *args: Any) -> Any:
        if self.after == 0:
            raise KeyboardInterrupt
        self.after -= 1
        return self._call(*args)


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
