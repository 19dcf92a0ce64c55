"""`preble ready`, asked about everything that Preble can run, as a container's health check asks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from support.commands import Running, until_up

Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts commands, and kills them at the end."""
    started: list[Running] = []

    def start(*arguments: str) -> Running:
        started.append(Running(*arguments))
        return started[-1]

    yield start
    for running in started:
        running.kill()


def ready(*arguments: str, port: str = "") -> tuple[int, str]:
    """Return the exit status and everything that is printed."""
    run = subprocess.run(
        [sys.executable, "-m", "preble", "ready", *arguments],
        env={**os.environ, "PREBLE_PORT": port},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return run.returncode, run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", [("serve",), ("select",), ("epp", "--grpc-port", "0")], ids=lambda one: one[0])
def test_a_command_is_ready_once_its_replica_is_up(start: Start, command: tuple[str, ...]) -> None:
    replica = start("emulate", "--profile", "tiny-cpu", "--port", "0").wait_for(r"(http://\S+)")[1]
    url = start(*command, "--replica", replica, "--port", "0").wait_for(r"listening.*(http://[\d.:]+)")[1]
    until_up(url, 1)
    assert ready(port=url.rpartition(":")[2]) == (0, f"{url} is ready\n"), "its own port"
    assert ready("--url", replica) == (0, f"{replica} is ready\n"), "an engine has no /ready"


@pytest.mark.slow
def test_a_gateway_without_a_replica_and_one_that_is_not_there_are_not_ready(start: Start) -> None:
    gateway = start("serve", "--replica", "http://127.0.0.1:1", "--engine", "openai", "--port", "0")
    url = gateway.wait_for(r"listening.*(http://[\d.:]+)")[1]
    assert ready("--url", url) == (1, f"preble: {url} is not ready: no replica is up\n")
    status, said = ready("--url", "http://127.0.0.1:1")
    assert (status, said.count("\n")) == (1, 1) and "nothing answers" in said
