"""What a plan asks for, and when: rates, mixes, and the command that writes it as a trace."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from preble.cli import cli
from preble.errors import ConfigError
from preble.lab.workloads import Workload, WorkloadPlan, make_workload, packed_prompt, read_trace
from preble.lab.workloads.mix import Part, parts_of

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def azure(folder: Path, name: str, gap_s: int, num: int = 30) -> Path:
    """A trace with a request every `gap_s` seconds."""
    path = folder / name
    path.write_text(
        HEADER + "".join(f"2023-11-16 18:{i * gap_s // 60:02}:{i * gap_s % 60:02}.0,10,5\n" for i in range(num))
    )
    return path


def arrivals(workload: Workload) -> list[float]:
    return [request.arrival_s or 0.0 for request in workload.openers]


def part_of(request_id: str) -> str:
    return request_id.partition(":")[0]


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("video", [Part("video")]),
        ("./a.csv:3", [Part("./a.csv", 3.0)]),
        ("toolbench:.5+video:0.5", [Part("toolbench", 0.5), Part("video", 0.5)]),
        ("a:2@gamma+b@t.csv.gz[200:2200]", [Part("a", 2.0, "gamma"), Part("b", 1.0, "t.csv.gz[200:2200]")]),
    ],
)
def test_a_source_names_workloads_shares_and_arrivals(source: str, parts: list[Part]) -> None:
    assert parts_of(source) == tuple(parts)


def test_a_file_goes_before_a_mix_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a+b:2").touch()
    assert parts_of("a+b:2") == (Part("a+b:2"),)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"source": "video+"}, "'' is not of the form"),
        ({"source": "video:0+agent"}, "share of 'video' must be positive"),
        ({"source": "video+nope"}, "'nope' is neither a file nor one of"),
        ({"source": "video:999+agent"}, "leave none for a part"),
        ({"source": "video+agent", "requests": None}, "give the number of requests"),
        ({"source": "video+agent", "rps": None}, "'video' has no arrival times of its own"),
        ({"source": "video@often"}, "unknown arrivals 'often'"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        WorkloadPlan(**({"requests": 10, "rps": 1.0} | fields)).make()


def test_the_parts_of_a_mix_have_their_shares_of_requests_and_rate() -> None:
    workload = WorkloadPlan(source="toolbench:3+video", requests=2000, rps=8.0).make()
    assert Counter(part_of(request.request_id) for request in workload.requests) == {"0": 1500, "1": 500}
    assert arrivals(workload) == sorted(arrivals(workload))
    for part, rps in (("0", 6.0), ("1", 2.0)):
        times_s = [r.arrival_s or 0.0 for r in workload.openers if part_of(r.request_id) == part]
        assert (len(times_s) - 1) / times_s[-1] == pytest.approx(rps, rel=0.1)


def test_a_mix_of_a_workload_with_itself_asks_for_different_things() -> None:
    workload = WorkloadPlan(source="video+video", requests=40, rps=1.0).make()
    prompts = [{packed_prompt(r) for r in workload.requests if part_of(r.request_id) == part} for part in "01"]
    assert not prompts[0] & prompts[1]
    assert len({request.request_id for request in workload.requests}) == 40


def test_each_part_of_a_mix_can_have_its_own_recorded_arrivals(tmp_path: Path) -> None:
    slow, fast = azure(tmp_path, "slow.csv", 4), azure(tmp_path, "fast.csv", 1)
    plan = WorkloadPlan(source=f"toolbench@{slow}[2:12]+video@{fast}", requests=20)
    times_s: dict[str, list[float]] = {"0": [], "1": []}
    for request in plan.make().openers:
        times_s[part_of(request.request_id)].append(request.arrival_s or 0.0)
    assert [b - a for a, b in pairwise(times_s["0"])] == [4.0] * 9
    assert [b - a for a, b in pairwise(times_s["1"])] == [1.0] * 9
    assert plan.files() == (slow, fast)


def test_sessions_stay_closed_loops_in_a_mix() -> None:
    workload = WorkloadPlan(source="agent+multiturn", requests=400, rps=10.0).make()
    seen: dict[str, str | None] = {}
    for request in workload.requests:
        assert request.parent is None or seen[request.parent] == request.session
        seen[request.request_id] = request.session


def test_the_rate_counts_the_requests_of_sessions() -> None:
    """100 episodes of 48 requests at 12 a second begin at a quarter of an episode a second."""
    workload = WorkloadPlan(source="agent", requests=4800, rps=12.0, arrivals="uniform").make()
    gaps_s = {round(b - a, 9) for a, b in pairwise(arrivals(workload))}
    assert gaps_s == {round(4800 / len(workload.openers) / 12.0, 9)}


def test_a_plan_makes_the_same_workload_each_time_and_survives_json() -> None:
    plan = WorkloadPlan(source="toolbench:2+multiturn", requests=60, rps=2.0, seed=4, popularity="uniform")
    again = msgspec.json.decode(msgspec.json.encode(plan), type=WorkloadPlan)
    assert again == plan
    assert again.make() == plan.make() != msgspec.structs.replace(plan, seed=5).make()


def test_files_of_a_plan_are_those_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = azure(tmp_path, "t.csv", 1)
    monkeypatch.chdir(tmp_path)
    Path("video").touch()
    assert WorkloadPlan(source=str(trace), arrivals=f"{trace}[0:5]").files() == (trace,)
    assert WorkloadPlan(source="video", rps=1.0).files() == (), "a name goes before a file"


def make(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["workload", "make", *arguments])


def test_make_writes_what_a_plan_makes(tmp_path: Path) -> None:
    out = tmp_path / "mix.jsonl.gz"
    result = make("toolbench:2+agent", "--requests", "90", "--rps", "3", "--seed", "8", "-o", str(out))
    assert (result.exit_code, result.stdout) == (0, "")
    assert "90 requests" in result.stderr
    plan = WorkloadPlan(source="toolbench:2+agent", requests=90, rps=3.0, seed=8)
    assert read_trace(out) == plan.make()


def test_make_without_a_rate_writes_no_times(tmp_path: Path) -> None:
    assert make("video", "--requests", "5", "-o", str(tmp_path / "t.jsonl")).exit_code == 0
    assert read_trace(tmp_path / "t.jsonl").requests == make_workload("video", 5, 0).requests


def test_make_translates_a_file_of_another_format(tmp_path: Path) -> None:
    trace = azure(tmp_path, "t.csv", 2, num=4)
    assert make(str(trace), "-o", str(tmp_path / "t.jsonl")).exit_code == 0
    assert arrivals(read_trace(tmp_path / "t.jsonl")) == [0.0, 2.0, 4.0, 6.0]


def test_make_says_what_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = make("video", "--requests", "5", "-o", str(tmp_path / "file" / "t.jsonl"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is no folder" in result.stderr


def test_a_study_of_a_mix_says_to_write_it_first() -> None:
    with pytest.raises(ConfigError, match="preble workload make"):
        make_workload("video+agent", 10, 0)
