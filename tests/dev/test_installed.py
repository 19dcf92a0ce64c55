"""The wheel, installed into an environment of its own and used from the command line, far from the sources."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dev.conftest import COMMIT, ROOT
from support.commands import Running, ask, until_up
from support.empty_venv import install_wheel

NOT_HERE = {"dev", "docs", "ray"}
"""Extras whose libraries the development environment lacks, or that only it needs; `.servers/ray` has Ray."""
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys() - NOT_HERE
COMPARE = (
    *("compare", "--workload", "tool_use", "--policy", "preble,round_robin", "--replicas", "2"),
    *("--rps", "4", "--requests", "40", "--seed", "0", "--jobs", "1", "--json", "result.json"),
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[(), tuple(sorted(EXTRAS))], ids=["no extras", "all extras"])
def programs(request: pytest.FixtureRequest, wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_wheel(wheel_file, tmp_path_factory.mktemp("installed") / "venv", request.param)


@pytest.fixture
def preble(programs: Path, tmp_path: Path) -> Iterator[Preble]:
    installed = Preble(programs / "preble", tmp_path)
    yield installed
    for running in installed.started:
        running.kill()


class Preble:
    """The installed command, run in an empty folder."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._program, self._folder = program, folder
        self.started: list[Running] = []

    def start(self, *arguments: str) -> Running:
        self.started.append(Running(*arguments, program=[str(self._program)], cwd=self._folder))
        return self.started[-1]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [self._program, *arguments]
        return subprocess.run(command, cwd=self._folder, env=environ, capture_output=True, text=True, check=False)


def test_it_serves_and_compares(preble: Preble, tmp_path: Path) -> None:
    assert preble.run("--version").stdout.endswith(f"(commit {COMMIT})\n")
    replica = preble.start("emulate", "--profile", "tiny-cpu", "--port", "0").wait_for(r"(http://\S+)")[1]
    gateway = preble.start("serve", "--replica", replica, "--port", "0", "--workers", "2")
    url = gateway.wait_for(r"listening on (http://\S+)$")[1]
    until_up(url, 1)
    _, answer = ask(url, {"model": "tiny-cpu", "prompt": "Once upon a time", "max_tokens": 3})
    assert answer["choices"]
    gateway.process.send_signal(signal.SIGTERM)
    assert gateway.end() == 0
    compared = preble.run(*COMPARE)
    assert compared.returncode == 0, compared.stderr
    assert len(json.loads((tmp_path / "result.json").read_text())["runs"]) == 2


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["epp", "--pool", "p"], "epp"),
        (["serve", "--replica", "http://127.0.0.1:1", "--peers", "nats://127.0.0.1:1"], "ha"),
    ],
)
def test_what_needs_an_extra_names_it(preble: Preble, programs: Path, command: list[str], extra: str) -> None:
    if any(programs.parent.glob("lib/python*/site-packages/lightkube")):
        pytest.skip("this environment has the extras")
    said = preble.run(*command)
    assert said.returncode == 2 and f"preble[{extra}]" in said.stderr
