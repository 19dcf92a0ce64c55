"""Which policy made the kept results: a change of a policy fails for each page that shows what it made earlier."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from preble.lab.compare import ComparePlan, compare_policies, read_result
from preble.lab.sim import SimConfig
from preble.lab.workloads import WorkloadPlan
from preble.profiles import load_profile
from support.scripts import ROOT, script

PLAYS = ("preble.lab.sim import", "preble.lab.compare import compare", "cpu_engines.measure(", "started_gateway(")
"""What a script that judges a policy has in it."""
NOT_NOTED = {
    "cpu_engines": "for `backends`, `fidelity` and `real_check`, which note it",
    "evaluation_cases": "cases of `grid_case`",
    "fairness": "one replica: no policy chooses",
    "gateway_ranking": "`gateway_ranking_case` notes it",
    "hard_cases": "has a digest in each outcome",
    "hard_family": "cases of `hard_cases`",
    "noisy_neighbour": "judges the gateway's queue",
    "send_ids": "judges how long the gateway takes",
}


class _Run(msgspec.Struct, frozen=True):
    """What a script with kept runs measures."""

    case: str
    seed: int

    @property
    def key(self) -> tuple[str, int]:
        return self.case, self.seed


@pytest.mark.parametrize("page", script("benchmarks/repro/made_by.py").PAGES, ids=lambda path: path.name)
def test_a_page_shows_todays_policy_but_for_what_takes_too_long_which_it_says(page: Path) -> None:
    made_by, markers = script("benchmarks/repro/made_by.py"), script("benchmarks/repro/page.py")
    values, text = made_by.values(), page.read_text(encoding="utf-8")
    assert markers.filled(text, values) == text, "fill it in: python benchmarks/repro/made_by.py"
    shown = {name.removeprefix("value:policy-") for name in markers.names(text) if name in values}
    assert shown, "it shows results of no policy: take it from PAGES"
    stale = (shown & made_by.old().keys()) - made_by.DEAR.keys()
    assert not stale, f"make anew: benchmarks/repro/{', '.join(sorted(stale))}"


def test_each_result_that_a_policy_made_is_shown_with_its_policy() -> None:
    made_by, markers = script("benchmarks/repro/made_by.py"), script("benchmarks/repro/page.py")
    shown = {name for path in made_by.PAGES for name in markers.names(path.read_text(encoding="utf-8"))}
    assert made_by.values().keys() <= shown
    assert made_by.DEAR.keys() | set(made_by.E2) <= made_by.makers().keys()


def test_a_page_that_shows_what_an_earlier_policy_may_have_made_says_which_it_was() -> None:
    made_by, markers = script("benchmarks/repro/made_by.py"), script("benchmarks/repro/page.py")
    assert made_by.MARKS.keys() == made_by.DEAR.keys()
    seen = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")):
        names = markers.names(page.read_text(encoding="utf-8"))
        shown = {result for result, begins in made_by.MARKS.items() if any(name.startswith(begins) for name in names)}
        said = {name.removeprefix("value:policy-") for name in names}
        assert shown <= said, f"{page.name}: say of which policy {', '.join(sorted(shown - said))} is"
        seen |= shown
    assert seen == made_by.MARKS.keys()


def test_each_script_that_judges_a_policy_notes_which_it_was() -> None:
    found = set()
    for path in (ROOT / "benchmarks" / "repro").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if any(part in text for part in PLAYS) and "note(" not in text and "cases import Kept" not in text:
            found.add(path.stem)
    assert found == NOT_NOTED.keys()


def test_another_policy_makes_every_result_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made_by = script("benchmarks/repro/made_by.py")
    monkeypatch.setattr(made_by, "policy_digest", lambda _policy: "another")
    assert all(value.endswith("not today's") for value in made_by.values().values())
    today = {name: msgspec.structs.replace(maker, policy="another") for name, maker in made_by.makers().items()}
    monkeypatch.setattr(made_by, "makers", lambda: today)
    assert set(made_by.values().values()) == {"today's `preble`", "today's `e2`"}


def test_what_goes_on_after_a_change_of_the_policy_plays_that_policy_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by, path = script("benchmarks/repro/made_by.py"), tmp_path / "comparison.json"
    monkeypatch.setattr(made_by, "KEPT", tmp_path / "made_by.json")  # the repository's own
    made_by.KEPT.write_bytes(b"{}")
    plan = ComparePlan(
        workloads={"tools": WorkloadPlan(source="toolbench", requests=20)},
        policies=("preble", "least_load"),
        cluster=SimConfig(profile=load_profile("a6000-mistral-7b"), replicas=2),
        seeds=(1,),
        rates=(2.0,),
    )
    assert not made_by.begin("held_out", path)
    whole = compare_policies(plan, path=path, jobs=1)
    assert not made_by.begin("held_out", path)
    assert read_result(path) == whole, "today's own runs stay"

    monkeypatch.setattr(made_by, "policy_digest", lambda _policy: "another")
    assert made_by.begin("held_out", path)
    left = read_result(path)
    assert not left.is_complete
    assert [run.policy for run in (*left.runs, *left.other_runs)] == ["least_load"]
    assert not made_by.begin("held_out", path), "what goes on is of one policy"
    assert compare_policies(plan, path=path, jobs=1) == whole


def test_runs_of_an_earlier_policy_are_not_kept_beside_todays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_by, cases = script("benchmarks/repro/made_by.py"), script("benchmarks/repro/cases.py")
    monkeypatch.setattr(made_by, "KEPT", tmp_path / "made_by.json")  # the repository's own
    monkeypatch.setattr(cases, "RESULTS", tmp_path)  # benchmarks/results
    monkeypatch.setattr(cases, "ProcessPoolExecutor", lambda jobs, _context: ThreadPoolExecutor(jobs))
    made_by.KEPT.write_bytes(b"{}")
    kept = cases.Kept("runs", _Run, lambda run: run.key, str)
    kept.play(_Run, [("one", 1)], 1)
    kept.play(_Run, [("two", 2)], 1)
    assert kept.known().keys() == {("one", 1), ("two", 2)}
    monkeypatch.setattr(made_by, "policy_digest", lambda _policy: "another")
    kept.play(_Run, [("two", 2)], 1)
    assert kept.known().keys() == {("two", 2)}
