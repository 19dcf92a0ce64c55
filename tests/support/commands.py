"""Commands of Preble as processes: what they print, how they end, and what they leave behind."""

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
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.waiting import PATIENCE_S

MARK = "PREBLE_RUN_MARK"


class Running:
    """A `preble` process whose stderr and stdout are read line by line; all that it starts carries its mark."""

    def __init__(
        self, *arguments: str, program: Sequence[str] = (sys.executable, "-m", "preble"), cwd: Path | None = None
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [*program, *arguments],
            cwd=cwd,
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
