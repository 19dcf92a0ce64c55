"""`preble compare` as a user meets it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from preble.cli import cli
from preble.cli.compare import KEPT
from preble.core.policies.registry import policy_names
from preble.lab.compare import ComparePlan
from preble.lab.workloads import WorkloadPlan, write_trace

ONE = ("--requests", "10", "--replicas", "2", "--rps", "5,50", "--seed", "0", "--jobs", "1")
SMALL = ("--requests", "10", "--replicas", "2", "--kv-tokens", "24000", "--rps", "5,50", "--seed", "0,1", "--jobs", "1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are kept below the current folder."""
    monkeypatch.chdir(tmp_path)


def compare(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["compare", *arguments])


def test_people_get_a_ranking_progress_and_a_caution_on_stderr() -> None:
    result = compare(*SMALL)
    assert result.exit_code == 0
    shown = " ".join(result.stdout.split())
    for words in (
        "multiturn",
        "sglang_cache_aware",
        "round_robin",
        "least_load",
        "capacity",
        "TTFT p99 ≤ 2 s",
        "≥ 50",
        "hit rate =",
    ):
        assert words in shown
    assert "compare: 16/16 runs" in result.stderr
    assert "Give more requests" in result.stderr


def test_programs_get_the_result_on_stdout() -> None:
    result = compare(*SMALL, "--json", "-", "--slo-e2e", "3", "--fail", "0.5:restarted:r1", "--order", "groups")
    data = json.loads(result.stdout)
    assert data["is_complete"] and len(data["runs"]) == 16 and len(data["standings"]) == 4
    assert data["plan"]["slo"] == {"ttft_p99_s": None, "e2e_mean_s": 3.0}
    assert data["plan"]["cluster"]["failures"] == [{"time_s": 0.5, "kind": "restarted", "replica": "r1"}]
    assert data["plan"]["cluster"]["order"] == "groups"
    assert {run["workload"]["requests"] for run in data["runs"]} == {10}


@pytest.mark.slow
def test_the_same_command_makes_nothing_again_and_draws_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/preble", "compare", "--seed", "1"])
    file, page = tmp_path / "result.json", tmp_path / "page.html"
    assert compare(*SMALL, "--json", str(file)).exit_code == 0
    before = file.read_bytes()
    again = compare(*SMALL, "--json", str(file), "--html", str(page))
    assert (again.exit_code, file.read_bytes()) == (0, before)
    assert "runs" not in again.stderr
    drawn = page.read_text(encoding="utf-8")
    assert drawn.count("<svg") == 10
    assert re.search(r"<footer>Made on \d{4}-\d\d-\d\d .* by: preble compare --seed 1<", drawn)


def test_values_with_spaces_between_get_a_hint_of_the_comma() -> None:
    result = compare("--policy", "e2", "least_load")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "unexpected extra argument (least_load). Put commas between" in result.stderr


def test_without_the_baseline_no_column_compares_with_it() -> None:
    result = compare(*SMALL, "--policy", "preble,e2")
    assert result.exit_code == 0
    assert "against" not in result.stdout


def test_options_can_be_listed_or_repeated() -> None:
    options = ("--rps", "5", "--rps", "50", "--seed", "0", "--seed", "1", "--policy", "e2", "--policy", "chwbl,random")
    result = compare("--requests", "10", "--replicas", "2", "--jobs", "1", "--json", "-", *options)
    plan = json.loads(result.stdout)["plan"]
    assert (plan["rates"], plan["seeds"], plan["policies"]) == ([5, 50], [0, 1], ["e2", "chwbl", "random"])


def test_bounds_are_without_endy_workload_or_for_one() -> None:
    options = ("--workload", "tool_use", "--workload", "video", "--slo-ttft", "1", "--slo-ttft", "video=5")
    result = compare(*SMALL, *options, "--slo-e2e", "video=30", "--policy", "e2", "--json", "-")
    plan = json.loads(result.stdout)["plan"]
    assert plan["slo"] == {"ttft_p99_s": 1.0, "e2e_mean_s": None}
    assert plan["slos"] == {"video": {"ttft_p99_s": 5.0, "e2e_mean_s": 30.0}}


def test_all_policies_are_all_there_are() -> None:
    result = compare("--requests", "4", "--rps", "5", "--seed", "0", "--jobs", "1", "--policy", "all", "--json", "-")
    assert tuple(json.loads(result.stdout)["plan"]["policies"]) == policy_names()


def test_files_of_one_name_are_distinguished(tmp_path: Path) -> None:
    sources: list[str] = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        trace = tmp_path / folder / "mine.jsonl"
        write_trace(trace, WorkloadPlan(source="tool_use", requests=3, rps=5.0, seed=len(sources)).make())
        sources += ["--workload", str(trace)]
    result = compare(*sources, "--rps", "recorded", "--seed", "0", "--policy", "e2", "--jobs", "1", "--json", "-")
    assert list(json.loads(result.stdout)["plan"]["workloads"]) == ["mine", str(tmp_path / "b" / "mine.jsonl")]


def test_an_interruption_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(cell: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("preble.lab.compare.run.run_cell", interrupted)
    file = tmp_path / "result.json"
    result = compare(*SMALL, "--json", str(file))
    assert result.exit_code == 130
    assert f"{file}; the same command goes on from there" in result.stderr
    assert f"{KEPT}; the same command goes on from there" in compare(*SMALL).stderr
    monkeypatch.setattr("os.access", lambda path, mode: path != KEPT.parent)
    assert "nothing was kept" in compare(*SMALL).stderr


def test_runs_are_kept_where_nobody_names_a_file_and_a_file_of_no_use_is_begun_anew() -> None:
    assert compare(*ONE).exit_code == 0
    again = compare(*ONE, "--json", "-")
    assert "runs" not in again.stderr, "nothing is made again"
    KEPT.write_text("of another version")
    assert "8/8 runs" in compare(*ONE).stderr


@pytest.mark.parametrize(
    ("arguments", "loads", "lasting_s", "search"),
    [
        ((), (0.3, 0.6), 270.0, False),
        (("--rps", "auto"), (0.8,), 540.0, True),
        (("--load", "0.5"), (0.5,), 270.0, False),
    ],
)
def test_a_capacity_is_only_searched_when_asked_for(
    arguments: tuple[str, ...],
    loads: tuple[float, ...],
    lasting_s: float,
    search: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[ComparePlan] = []

    def note(plan: ComparePlan, **how: object) -> None:
        asked.append(plan)
        raise KeyboardInterrupt

    monkeypatch.setattr("preble.lab.compare.compare_policies", note)
    assert compare(*arguments).exit_code == 130
    [plan] = asked
    assert (plan.seeds, plan.policies[0]) == ((0,), "preble")
    assert (plan.loads, plan.lasting_s, plan.search, plan.rates) == (loads, lasting_s, search, ())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--policy", "best"), "unknown policy 'best'"),
        (("--policy", "e2,e2"), "policy is given twice"),
        (("--workload", "nope", "--jobs", "1"), "neither a file nor one of"),
        (("--rps", "fast"), "'fast' is not quick, auto, recorded, or numbers"),
        (("--rps", "auto,5"), "either quick, auto or rates"),
        (("--rps", "-5"), "must be positive"),
        (("--rps", "recorded", "--jobs", "1"), "no arrival times of its own"),
        (("--seed", "1.5"), "'1.5' is not whole numbers"),
        (("--load", "half"), "'half' is not numbers"),
        (("--slo-ttft", "0"), "--slo-ttft"),
        (("--slo-e2e", "long=1"), "SLO is given for long; the workloads are multiturn"),
        (("--fail", "5:lost:r9"), "replica 'r9' is not there"),
        (("--profile", "h900"), "no profile is called 'h900'"),
        (("--arrivals", "burst"), "give rates"),
        (("--jobs", "0"), "--jobs"),
    ],
)
def test_what_is_wrong_gets_one_line_and_status_2(arguments: tuple[str, ...], says: str) -> None:
    result = compare(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr.splitlines()[-1]


def test_targets_add_runs_that_know_them_and_a_table_of_goodput() -> None:
    options = ("--workload", "toolbench:3+video", "--requests", "12", "--rps", "5", "--policy", "e2", "--jobs", "1")
    result = compare(*options, "--ttft-target", "0.5", "--ttft-target", "video=60", "--tpot-target", "0.2")
    assert result.exit_code == 0
    shown = " ".join(result.stdout.split())
    for words in ("e2, promising", "goodput at 5 requests/s", "video: TTFT ≤ 60 s, TPOT ≤ 0.2 s", "Goodput ="):
        assert words in shown


def test_a_target_of_no_class_is_a_usage_error() -> None:
    result = compare(*ONE, "--ttft-target", "video=1")
    assert result.exit_code == 2 and "no workload has the class video" in result.stderr
