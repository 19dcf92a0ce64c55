"""A policy of somebody else's: the one of docs/howto/own-policy.md, in every command that takes a policy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from cli.test_end_to_end import Running, ask, linux_only, until_up
from cli.test_end_to_end import preble as preble
from preble.core.types import Reason, ReplicaId, ReplicaSpec, Request
from preble.decisions.reader import LogReader
from preble.decisions.settings import SchedulerSettings, make_scheduler
from preble.errors import ConfigError, PolicyError
from preble.lab.replay.log_lookup import decisions_about
from preble.lab.replay.replay import Replay
from preble.lab.replay.what_if import outcomes
from preble.plugins import classes
from preble.plugins.policies import make_policy, policy_names
from support.logs import PROFILE, Recording
from support.waiting import PATIENCE_S

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "own-policy.md"
MINE = "my_policies:ShortestWork"
BROKEN = """
from preble import Choice, Reason

no_class = 1


class Mute:
    name = "mute"


class Nameless:
    def choose(self, view, rng):
        return Choice(view.replicas[0], Reason.POLICY)


class NeedsMore:
    def __init__(self, more):
        pass


class Astray:
    name = "astray"

    def choose(self, view, rng):
        return Choice(7, Reason.POLICY)


class Failing:
    name = "failing"

    def choose(self, view, rng):
        return view.candidates[0].no_such_attribute


class Silent:
    name = "silent"

    def choose(self, view, rng):
        pass


class Viewing:
    name = "viewing"

    def choose(self, view, rng):
        return view.candidates[0]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the page's module and some bad ones."""
    [module] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "my_policies.py").write_text(module)
    (tmp_path / "broken_policies.py").write_text(BROKEN)
    (tmp_path / "raising_policies.py").write_text("1 / 0\n")
    (tmp_path / "importing_policies.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def output(*arguments: str) -> str:
    command = [sys.executable, "-m", "preble", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout


@linux_only
@pytest.mark.slow
def test_it_serves_through_the_gateway_in_front_of_replicas(folder: Path, preble: type[Running]) -> None:
    up = preble("up", "--engine", "emulator", "--replicas", "2", "--port", "0", "--log-dir", ".", "--policy", MINE)
    url = up.wait_for(r"listening on (http://\S+)$")[1]
    until_up(url, 2)
    body = {"prompt": " ".join(f"word{i}" for i in range(200)), "max_tokens": 2}
    first, again = ask(url, body)[0], ask(url, body)[0]
    assert first["x-preble-replica"] == again["x-preble-replica"], "the prompt is cached there"
    with urllib.request.urlopen(f"{url}/debug/decisions", timeout=PATIENCE_S) as page:
        decision = json.load(page)["decisions"][0]
    assert (decision["policy"], decision["reason"]) == ("shortest_work", Reason.POLICY)
    scores = {one["replica"]: one["score"] for one in decision["candidates"]}
    assert scores[again["x-preble-replica"]] == min(scores.values()) < max(scores.values())


def test_it_is_simulated(folder: Path) -> None:
    page = output("simulate", "--policy", MINE, "--requests", "40", "--rps", "10", "--json", "-")
    assert json.loads(page)["policy"] == "shortest_work"


def test_it_is_compared_in_processes_of_their_own(folder: Path) -> None:
    plan = ("--requests", "30", "--rps", "10", "--seed", "0", "--jobs", "2", "--json", "-")
    result = json.loads(output("compare", "--policy", f"{MINE},least_load", *plan))
    assert {run["policy"] for run in result["runs"]} == {MINE, "least_load"}


@pytest.fixture
def log(folder: Path) -> Path:
    """A decision log whose header names the page's policy."""
    recording = Recording(SchedulerSettings(policy=MINE))
    recording.scheduler.add_replica(ReplicaSpec(ReplicaId("a")), 0.0)
    recording.scheduler.place(Request.of("r", [1, 2, 3]), 0.0)
    del sys.modules["my_policies"]
    return recording.written_to(folder / "log.jsonl")


def test_a_log_that_names_it_runs_no_code_unless_asked_to(log: Path) -> None:
    for play in (lambda: Replay(LogReader(log)), lambda: decisions_about(log, "r"), lambda: [*outcomes(log, ("e2",))]):
        with pytest.raises(ConfigError, match=f"names the policy {MINE}.*add --import-policy"):
            play()
    assert "my_policies" not in sys.modules
    assert [one.policy for one in outcomes(log, (MINE,))][1:] == [MINE]
    assert decisions_about(log, "r", import_policy=True)[0].replica == "a"
    assert output("replay", str(log), "--import-policy").startswith("1 placements")


def test_a_package_gives_it_a_short_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", MINE, "preble.policies")
    monkeypatch.setattr(classes, "entry_points", lambda **select: EntryPoints((point,)).select(**select))
    assert policy_names()[-1] == "mine"
    assert make_policy("mine").name == "shortest_work"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "unknown policy 'nothing'; choose one of preble, e2, .*, or name module:Class"),
        ("no_such_module:Mine", "policy 'no_such_module:Mine': there is no module 'no_such_module' in /"),
        ("my_policies:Mine", "the module my_policies has no class 'Mine'"),
        ("broken_policies:no_class", "the module broken_policies has no class 'no_class'"),
        ("broken_policies:Mute", r"Mute needs a method choose\(self, view, rng\)"),
        ("broken_policies:Nameless", "Nameless needs a name, such as name = 'mine'"),
        ("broken_policies:NeedsMore", "making one failed: TypeError: .*more"),
        ("raising_policies:Mine", "importing raising_policies failed: ZeroDivisionError"),
        ("importing_policies:Mine", "importing importing_policies failed: ModuleNotFoundError: .*no_such_library"),
    ],
)
def test_one_that_cannot_be_used_is_refused_with_the_reason(folder: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_policy(name)


def test_a_choice_that_is_no_candidate_is_an_error_and_changes_nothing(folder: Path) -> None:
    scheduler = make_scheduler(SchedulerSettings(policy="broken_policies:Astray"), PROFILE)
    scheduler.add_replica(ReplicaSpec(ReplicaId("a")), 0.0)
    with pytest.raises(PolicyError, match="policy 'astray' chose replica index 7"):
        scheduler.place(Request.of("r", [1, 2, 3]), 0.0)
    assert scheduler.snapshot().num_in_flight == 0


def test_a_failure_of_it_names_its_own_line(folder: Path) -> None:
    scheduler = make_scheduler(SchedulerSettings(policy="broken_policies:Failing"), PROFILE)
    scheduler.add_replica(ReplicaSpec(ReplicaId("a")), 0.0)
    line = BROKEN.splitlines().index("        return view.candidates[0].no_such_attribute") + 1
    failed = rf"policy 'failing' failed in .*broken_policies\.py, line {line}: AttributeError: .*no_such_attribute"
    with pytest.raises(PolicyError, match=failed):
        scheduler.place(Request.of("r", [1, 2, 3]), 0.0)
    assert scheduler.snapshot().num_in_flight == 0


@pytest.mark.parametrize("how", [("simulate",), ("compare", "--jobs", "2", "--seed", "0")])
def test_a_failure_of_it_is_not_called_a_bug_in_preble(folder: Path, how: tuple[str, ...]) -> None:
    command = [
        sys.executable,
        "-m",
        "preble",
        *how,
        "--policy",
        "broken_policies:Failing",
        "--rps",
        "5",
        "--requests",
        "9",
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("preble: policy 'failing' failed in ") and "broken_policies.py, line" in last


def test_a_policy_that_returns_nothing_is_told_so(folder: Path) -> None:
    scheduler = make_scheduler(SchedulerSettings(policy="broken_policies:Silent"), PROFILE)
    scheduler.add_replica(ReplicaSpec(ReplicaId("a")), 0.0)
    with pytest.raises(PolicyError, match=r"policy 'silent' (returned None; return Choice\(|failed.*got None)"):
        scheduler.place(Request.of("r", [1, 2, 3]), 0.0)


@pytest.mark.plain
def test_a_policy_that_returns_a_view_of_a_replica_is_told_what_to_return(folder: Path) -> None:
    scheduler = make_scheduler(SchedulerSettings(policy="broken_policies:Viewing"), PROFILE)
    scheduler.add_replica(ReplicaSpec(ReplicaId("a")), 0.0)
    said = "policy 'viewing' returned ReplicaView('a'); return Choice(replica.index, Reason.POLICY)"
    with pytest.raises(PolicyError, match=re.escape(said)):
        scheduler.place(Request.of("r", [1, 2, 3]), 0.0)
