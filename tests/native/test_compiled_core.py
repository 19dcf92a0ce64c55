"""`make test-native` tests the compiled core, and every other run the sources: no stale compiled module in between."""

from __future__ import annotations

import importlib
import os
import pickle
import tomllib
import zipfile
from pathlib import Path

import pytest

from preble.core.types import ReplicaId, ReplicaSpec, Request, RequestId
from preble.decisions.reader import LogReader
from preble.decisions.settings import SchedulerSettings
from preble.lab.compare import ComparePlan
from preble.lab.compare.plan import Arm
from preble.lab.replay.replay import Replay
from preble.lab.sim import SimConfig
from preble.lab.workloads import WorkloadPlan
from support.logs import PROFILE, Recording

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MYPYC = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["mypyc"]
SOURCES = {path for pattern in MYPYC["include"] for path in ROOT.glob(pattern)} - {
    ROOT / path for path in MYPYC["exclude"]
}
COMPILED = sorted(
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__") for path in SOURCES
)


@pytest.mark.skipif(os.environ.get("PREBLE_TEST_NATIVE") != "1", reason="`make native` builds the compiled wheel")
def test_the_compiled_wheel_is_of_this_machine_and_has_every_compiled_module() -> None:
    [wheel] = (ROOT / ".native" / "wheel").glob("*.whl")
    assert not wheel.name.endswith("-none-any.whl")
    files = zipfile.ZipFile(wheel).namelist()
    for name in COMPILED:
        module = name.replace(".", "/")
        assert any(file.startswith((f"{module}.", f"{module}/__init__.")) and file.endswith(".so") for file in files), (
            name
        )


@pytest.mark.parametrize("name", COMPILED)
def test_the_core_is_what_this_run_is_to_test(name: str) -> None:
    path = importlib.import_module(name).__file__
    assert path is not None and path.endswith(".so" if os.environ.get("PREBLE_TEST_NATIVE") == "1" else ".py")


@pytest.mark.parametrize("policy", ["preble", "e2?threshold=2&replicate=false"])
def test_a_decision_log_is_read_and_replayed(tmp_path: Path, policy: str) -> None:
    settings = SchedulerSettings(policy=policy)
    recording = Recording(settings)
    scheduler = recording.scheduler
    for name in ("a", "b"):
        scheduler.add_replica(ReplicaSpec(ReplicaId(name), 64), 0.0)
    for i in range(4):
        scheduler.place(Request.of(f"q{i}", range(20 + i)), 1.0 + i)
        scheduler.on_finish(RequestId(f"q{i}"), 5, 1.5 + i)
    log = LogReader(recording.written_to(tmp_path / "log.jsonl"))
    assert (log.header.settings, log.header.profile) == (settings, PROFILE)
    result = Replay(log).run()
    assert (result.compared, result.difference) == (4, None)


def test_what_a_comparison_runs_reaches_another_process() -> None:
    plan = ComparePlan(
        workloads={"tools": WorkloadPlan(source="tool_use", requests=12)},
        policies=("preble",),
        cluster=SimConfig(profile=PROFILE, window_s=90.0),
    )
    cell = plan.cell(Arm("tools", "preble", 3), 1.5)
    assert pickle.loads(pickle.dumps(cell)) == cell
