"""Who serves does without the laboratory: the package imports and the gateway serves with `preble.lab` out of reach."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.commands import Running, ask, until_up

WITHOUT = "import sys; sys.modules['preble.lab'] = None; "


@pytest.fixture
def started() -> Iterator[list[Running]]:
    running: list[Running] = []
    yield running
    for one in running:
        one.kill()


def test_the_package_and_its_public_names_outside_the_laboratory_are_imported() -> None:
    names = "preble.GlobalScheduler.__name__, preble.make_policy('preble').name"
    code = f"{WITHOUT}import preble; print({names}); preble.simulate"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["GlobalScheduler", "preble"]
    assert "preble.lab" in ended.stderr.splitlines()[-1], "the laboratory was within reach, so this test shows nothing"


def test_serve_places_a_completion_on_an_emulated_replica(started: list[Running]) -> None:
    program = [sys.executable, "-c", f"{WITHOUT}import runpy; runpy.run_module('preble', run_name='__main__')"]
    started.append(Running("emulate", "--profile", "tiny-cpu", "--port", "0", program=program))
    replica = started[0].wait_for(r"(http://[\d.:]+)")[1]
    started.append(Running("serve", "--replica", replica, "--port", "0", program=program))
    url = started[1].wait_for(r"listening on (http://\S+)$")[1]
    until_up(url, 1)
    headers, answer = ask(url, {"prompt": "one two three", "max_tokens": 3})
    assert headers["x-preble-replica"] == replica
    assert answer["usage"]["completion_tokens"] == 3  # type: ignore[index]
