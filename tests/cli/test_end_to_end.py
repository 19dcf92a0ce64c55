"""Whole commands as processes: what they print, how they end, and that nothing of them is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.waiting import PATIENCE_S

MARK = "PREBLE_RUN_MARK"
linux_only = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")


class Running:
    """A `preble` process whose stderr and stdout are read line by line; all that it starts carries its mark."""

    def __init__(self, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "preble", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: self.mark},
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self._queue.put(line)
        self._queue.put(None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line from here on that matches."""
        [match] = self.wait_for_all(pattern)
        return match

    def wait_for_all(self, *patterns: str) -> list[re.Match[str]]:
        """The first lines from here on that match, in whichever order they come."""
        end = time.monotonic() + PATIENCE_S
        found: dict[str, re.Match[str]] = {}
        while len(found) < len(patterns):
            try:
                line = self._queue.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                missing = [pattern for pattern in patterns if pattern not in found]
                pytest.fail(f"no line matched {missing}:\n{''.join(self.lines)}")
            self.lines.append(line)
            for pattern in patterns:
                if pattern not in found and (match := re.search(pattern, line)):
                    found[pattern] = match
        return [found[pattern] for pattern in patterns]

    def end(self) -> int:
        """Its exit status, once it has ended by itself."""
        status = self.process.wait(PATIENCE_S)
        while (line := self._queue.get(timeout=PATIENCE_S)) is not None:
            self.lines.append(line)
        return status

    def kill(self) -> None:
        """End it and everything that carries its mark, at once."""
        for pid in {self.process.pid, *marked_processes(self.mark)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()

    def left_behind(self) -> list[int]:
        """Processes that carry the mark still, after those that are just ending have had time to."""
        end = time.monotonic() + PATIENCE_S
        while (pids := marked_processes(self.mark)) and time.monotonic() < end:
            time.sleep(0.05)
        return pids


def marked_processes(mark: str) -> list[int]:
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.fixture
def preble() -> Iterator[type[Running]]:
    """Starts commands, and kills at the end what a failed test has left running."""
    started: list[Running] = []

    class Started(Running):
        def __init__(self, *arguments: str) -> None:
            super().__init__(*arguments)
            started.append(self)

    yield Started
    for running in started:
        running.kill()


def ask(url: str, body: dict[str, object]) -> tuple[dict[str, str], dict[str, object]]:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return {name.lower(): value for name, value in response.headers.items()}, json.load(response)


def until_up(url: str, count: int) -> None:
    """Wait until this many replicas are in the gateway's rotation."""
    end = time.monotonic() + PATIENCE_S
    while num_up(url) != count:
        assert time.monotonic() < end, f"not {count} replicas are up"
        time.sleep(0.05)


def num_up(url: str) -> int:
    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{url}/ready") as page:
        return int(json.load(page)["replicas"])
    return 0


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_and_one_signal_stops_all_of_it(preble: type[Running], tmp_path: Path, how: signal.Signals) -> None:
    up = preble("up", "--engine", "emulator", "--replicas", "2", "--port", "0", "--log-dir", str(tmp_path))
    url = up.wait_for(r"listening on (http://\S+)$")[1]
    until_up(url, 2)
    headers, answer = ask(url, {"prompt": "one two three", "max_tokens": 3})
    assert headers["x-preble-replica"].startswith("http://127.0.0.1:")
    assert answer["usage"]["completion_tokens"] == 3  # type: ignore[index]
    up.process.send_signal(how)
    assert up.end() == 0, up.lines
    assert up.left_behind() == []


@linux_only
@pytest.mark.slow
def test_up_goes_on_without_a_replica_that_ends_and_starts_it_again(preble: type[Running], tmp_path: Path) -> None:
    up = preble("up", "--engine", "emulator", "--replicas", "2", "--port", "0", "--log-dir", str(tmp_path))
    url = up.wait_for(r"listening on (http://\S+)$")[1]
    until_up(url, 2)
    engines = [pid for pid in marked_processes(up.mark) if b"emulate" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    engine = next(pid for pid in engines if b"guard.py" not in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(engine, signal.SIGKILL)
    up.wait_for_all(r"emulator-\d ended with status", "replica_down", r"emulator-\d is ready again at")
    assert ask(url, {"prompt": "one two three", "max_tokens": 3})[1]["usage"]["completion_tokens"] == 3  # type: ignore[index]
    until_up(url, 2)
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0, up.lines
    assert up.left_behind() == []


@linux_only
@pytest.mark.slow
def test_the_demonstration_writes_its_result_and_shows_more_hits(preble: type[Running], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    demo = preble("demo", "--engine", "emulator", "--requests", "300", "--rps", "60", "--out", str(tmp_path))
    assert demo.end() == 0, demo.lines
    assert demo.left_behind() == []
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["engine"] == "emulator"
    arms = result["policies"]
    assert list(arms) == ["round_robin", "preble"]
    for arm in arms.values():
        assert (arm["requests"], arm["errors"], arm["partial"]) == (300, 0, False)
        assert len(arm["ttft_mean_s_of_turns"]) == 2
        assert {"ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "e2e_p99_s"} <= arm.keys()
        assert arm["hit_rate"] == pytest.approx(arm["hit_rate_reported"], abs=0.01)
    assert arms["preble"]["hit_rate"] > arms["round_robin"]["hit_rate"]
    assert set(arms["round_robin"]["requests_per_replica"].values()) <= {74, 75, 76}
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("at", ["starting 4 replicas", r"round_robin, turn 1 of 2: \d+/"])
def test_an_interrupted_demonstration_leaves_no_process(preble: type[Running], tmp_path: Path, at: str) -> None:
    demo = preble("demo", "--engine", "emulator", "--requests", "200", "--rps", "20", "--out", str(tmp_path))
    demo.wait_for(at)
    demo.process.send_signal(signal.SIGINT)
    assert demo.end() == 130, demo.lines
    assert demo.left_behind() == []
    assert "Traceback" not in "".join(demo.lines)
