"""What a newcomer to the Python API does wrong, and what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import preble
from preble.core.types import ReplicaId, ReplicaSpec, Request, RequestId
from preble.decisions.settings import SchedulerSettings, make_scheduler
from support.logs import PROFILE

UNGUARDED = """
import preble

preble.compare_policies(
    preble.ComparePlan(
        workloads={"tools": preble.WorkloadPlan(source="tool_use", requests=20)},
        policies=("round_robin", "least_load"),
        cluster=preble.SimConfig(profile=preble.load_profile("a6000-mistral-7b"), replicas=2),
        rates=(5.0,),
    ),
    jobs=2,
)
"""
MISTAKES = """
import preble

preble.simulat
preble.load_profile(7)
"""


@pytest.mark.slow
def test_a_comparison_in_a_script_without_a_main_guard_says_what_to_write(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(UNGUARDED)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1
    assert f"each of them would run {script} again" in run.stderr
    assert 'if __name__ == "__main__":' in run.stderr.splitlines()[-1]
    assert run.stderr.count("Traceback") == 1, "no process was started"


@pytest.mark.slow
def test_a_type_checker_refuses_a_misspelled_name(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(MISTAKES)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", f"--cache-dir={tmp_path}", str(script)]
    source = Path(preble.__file__).parents[1]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env={"MYPYPATH": str(source)}
    )
    assert [line.rpartition("[")[2] for line in run.stdout.splitlines()] == ["attr-defined]", "arg-type]"], run.stdout


def test_swapped_arguments_of_simulate_are_named() -> None:
    simulate: Any = preble.simulate
    with pytest.raises(TypeError, match="SimConfig and a Workload, in this order; it got str, int"):
        simulate("tool_use", 4)


def test_a_list_as_prompt_is_told_how_to_become_one() -> None:
    prompt: Any = [1, 2, 3]
    with pytest.raises(TypeError, match=r"Request.of|bytes"):
        Request(RequestId("r"), prompt)


def test_a_scheduler_shows_what_it_is() -> None:
    scheduler = make_scheduler(SchedulerSettings(policy="least_load"), PROFILE)
    scheduler.add_replica(ReplicaSpec(ReplicaId("a")), 0.0)
    scheduler.place(Request.of("r", [1, 2, 3]), 0.0)
    assert repr(scheduler) == "<GlobalScheduler 'least_load': 1 replicas, 1 requests in flight>"


def test_a_trace_written_with_swapped_arguments_says_their_order(tmp_path: Path) -> None:
    swapped: Any = (preble.Workload("mine", ()), tmp_path / "mine.jsonl")
    with pytest.raises(TypeError, match="write_trace takes a Path and a Workload, in this order; it got Workload, "):
        preble.write_trace(*swapped)
