"""Container file, compose file and systemd units: what can be checked without a container daemon."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from preble.cli import cli
from preble.config import TimeoutsConfig
from support.servers import require_server

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CONTAINER = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
COMPOSE: Any = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text(encoding="utf-8"))
UNITS = ("preble.service", "preble.socket")
TIMEOUTS = TimeoutsConfig()


def test_the_container_is_made_of_files_that_are_there_and_runs_as_nobody_special() -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", CONTAINER, flags=re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert copied and all((ROOT / source).exists() for source in copied)
    assert [source for source in copied if not {source, source.split("/")[0]} & {*sent}] == []
    assert int(re.findall(r"^USER (\d+)", CONTAINER, flags=re.MULTILINE)[-1]) > 0


def test_the_container_has_extras_that_the_package_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [extras] = re.findall(r"'\.\[([\w,]+)\]'", CONTAINER)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def own_commands() -> list[Any]:
    return [
        pytest.param(service["command"], id=name)
        for name, service in COMPOSE["services"].items()
        if service["image"] == "preble"
    ]


@pytest.mark.parametrize("command", own_commands())
def test_composed_services_run_commands_that_there_are(command: list[str]) -> None:
    group = click.Context(cli, **cli.context_settings)
    found = cli.get_command(group, command[0])
    assert found is not None
    found.make_context(command[0], command[1:], parent=group)


def test_composed_services_find_each_other_and_their_files() -> None:
    services = COMPOSE["services"]
    named = [re.sub(r"^http://([\w-]+):8000$", r"\1", url) for url in services["gateway"]["command"] if ":" in url]
    assert named == [name for name in services if name.startswith("replica")]
    for service in services.values():
        for volume in service.get("volumes", ()):
            assert (DEPLOY / "compose" / volume.split(":")[0]).exists(), volume
    [grace_s] = re.findall(r"^(\d+)s$", services["gateway"]["stop_grace_period"])
    assert int(grace_s) > TIMEOUTS.drain_s + TIMEOUTS.shutdown_s


def test_containers_say_whether_they_are_healthy_and_wait_for_those_they_need() -> None:
    [check] = re.findall(r"^HEALTHCHECK .*CMD (\[.+\])$", CONTAINER, flags=re.MULTILINE)
    program, *command = json.loads(check)
    found = cli.get_command(click.Context(cli), command[0])
    assert (program, found is not None) == ("preble", True)
    of_image = {name for name, service in COMPOSE["services"].items() if service["image"] == "preble"}
    for name, service in COMPOSE["services"].items():
        needed = service.get("depends_on", {})
        conditions = {other: needed[other]["condition"] for other in of_image & {*needed}}
        assert set(conditions.values()) <= {"service_healthy"}, name


def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    promtool = require_server("prometheus", "promtool")
    shutil.copy(DEPLOY / "compose" / "prometheus.yml", tmp_path)
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", tmp_path)
    command = [promtool, "check", "config", tmp_path / "prometheus.yml"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("no systemd-analyze on the PATH")
    for unit in UNITS:
        text = (DEPLOY / "systemd" / unit).read_text(encoding="utf-8")
        (tmp_path / unit).write_text(text.replace("/opt/preble/bin/preble", "/bin/true"))  # which need not be there
    checked = subprocess.run([verify, "verify", *UNITS], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_systemd_waits_until_the_gateway_has_drained() -> None:
    unit = (DEPLOY / "systemd" / "preble.service").read_text(encoding="utf-8")
    [stop_s] = re.findall(r"^TimeoutStopSec=(\d+)$", unit, flags=re.MULTILINE)
    assert int(stop_s) > TIMEOUTS.drain_s + TIMEOUTS.shutdown_s
