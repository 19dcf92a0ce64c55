"""Whole commands as processes: what they print, how they end, and that nothing of them is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from preble.profiles import load_profile
from support.commands import Running, ask, marked_processes, until_up
from support.waiting import eventually

linux_only = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")


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
def test_up_starts_replicas_of_fixed_roles_and_serves_with_pairs_of_them(preble: type[Running], tmp_path: Path) -> None:
    roles = ("--prefill", "1", "--decode", "2")
    up = preble("up", "--engine", "emulator", *roles, "--port", "0", "--log-dir", str(tmp_path))
    url = up.wait_for(r"listening on (http://\S+)$")[1]
    until_up(url, 3)
    headers, answer = ask(url, {"prompt": "one two three", "max_tokens": 3})
    assert answer["usage"]["completion_tokens"] == 3  # type: ignore[index]
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0, up.lines
    ready = dict(re.findall(r"(\w+)-\d+ is ready at (\S+)", "\n".join(up.lines)))
    assert set(ready) == {"prefill", "decode"}
    assert headers["x-preble-replica"] != ready["prefill"], "it answers as the one that decodes"


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("way", ["p2p", "nixl"])
def test_up_starts_replicas_that_copy_from_each_other(preble: type[Running], tmp_path: Path, way: str) -> None:
    up = preble("up", "--engine", "emulator", "--transfer", way, "--port", "0", "--log-dir", str(tmp_path))
    url = up.wait_for(r"listening on (http://\S+)$")[1]
    until_up(url, 2)
    check = preble("check", "--url", url)
    assert check.end() == 0, check.lines
    assert sum("copy          verified" in line for line in check.lines) == 2, check.lines
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0, up.lines
    assert load_profile(str(tmp_path / "profile.json")).link_bytes_per_s


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
def test_an_interrupted_comparison_goes_on_where_it_was(preble: type[Running], tmp_path: Path) -> None:
    kept = tmp_path / "result.json"
    command = ("compare", "--rps", "20,21,22", "--lasting-s", "60", "--jobs", "2", "--json", str(kept))
    first = preble(*command)
    asyncio.run(eventually(lambda: kept.exists() and len(json.loads(kept.read_bytes())["runs"]) >= 2, "two runs"))
    first.process.send_signal(signal.SIGINT)
    assert first.end() == 130, first.lines
    assert first.left_behind() == []
    runs = json.loads(kept.read_bytes())["runs"]
    assert 2 <= len(runs) < 12
    again = preble(*command)
    assert again.wait_for(r"compare: (\d+)/\1 runs")[1] == str(12 - len(runs))
    assert again.end() == 0, again.lines
    result = json.loads(kept.read_bytes())
    assert result["is_complete"] and len(result["runs"]) == 12
    assert all(run in result["runs"] for run in runs)


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
