"""`preble simulate` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from preble.cli import cli

SMALL = ("--workload", "tool_use", "--rps", "20", "--requests", "30", "--replicas", "2", "--kv-tokens", "24000")


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", *arguments])


def test_people_get_a_table_and_progress_on_stderr() -> None:
    result = simulate(*SMALL, "--policy", "round_robin", "--seed", "3")
    assert result.exit_code == 0
    assert "round_robin" in result.stdout and "TTFT p99" in result.stdout and "GPU seconds" in result.stdout
    assert "2 x a6000-mistral-7b, 24,000 KV tokens, seed 3" in " ".join(result.stdout.split())
    assert "requests, by reason" in result.stdout  # `replicate` is one; what a search adds between requests is another
    assert "30/30 requests" in result.stderr


def test_programs_get_the_records_and_all_that_decided_them(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    result = simulate(*SMALL, "--seed", "3", "--fail", "0.5:lost:r1", "--sample-s", "0.5", "--json", str(file))
    assert result.exit_code == 0
    data = json.loads(file.read_bytes())
    assert len(data["records"]) == data["summary"]["requests"] == 30
    assert data["plan"] | {"source": "tool_use", "requests": 30, "rps": 20.0, "seed": 3} == data["plan"]
    assert (data["config"]["seed"], data["config"]["kv_tokens"], data["config"]["policy"]) == (3, 24000, "preble")
    assert data["config"]["failures"] == [{"time_s": 0.5, "kind": "lost", "replica": "r1"}]
    assert data["timeline"]["r0"]["time_s"][:2] == [0.0, 0.5]
    assert data["version"]


def test_the_same_seed_prints_the_same_bytes() -> None:
    first, second = (simulate(*SMALL, "--json", "-").stdout for _ in range(2))
    assert first == second
    assert json.loads(first)["summary"]["errors"] == 0


@pytest.mark.slow
def test_its_decision_log_explains_and_replays(tmp_path: Path) -> None:
    logs = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    first, second = (
        # Processes of their own: the command configures logging.
        subprocess.run(
            [sys.executable, "-m", "preble", "simulate", *SMALL, "--decision-log", str(log), "--json", "-"],
            check=True,
            capture_output=True,
        )
        for log in logs
    )
    assert first.stdout == second.stdout
    assert logs[0].read_bytes() == logs[1].read_bytes()
    record = json.loads(first.stdout)["records"][7]
    told = CliRunner().invoke(cli, ["explain", record["request_id"], "--log", str(logs[0])])
    assert told.exit_code == 0, told.stderr
    assert f"request {record['request_id']}, placed at {record['sent_s']:.3f} s on {record['replica']}" in told.stdout
    duration_s, output_tokens = record["end_s"] - record["sent_s"], record["output_tokens"]
    assert f"Finished after {duration_s:.3f} s with {output_tokens} output tokens." in told.stdout
    replayed = CliRunner().invoke(cli, ["replay", str(logs[0])])
    assert "30 placements of preble are made again" in replayed.stdout


def test_several_gateways_are_as_the_options_say() -> None:
    result = simulate(*SMALL, "--gateways", "3", "--gossip-loss", "0.1", "--gossip-cut", "0.5:1", "--json", "-")
    group = json.loads(result.stdout)["config"]["group"]
    assert group == {"gateways": 3, "delay_s": 0.05, "loss": 0.1, "cuts": [{"from_s": 0.5, "until_s": 1.0}]}
    never = simulate(*SMALL, "--gateways", "2", "--gossip-delay", "never", "--json", "-")
    assert json.loads(never.stdout)["config"]["group"]["delay_s"] is None
    alone = simulate(*SMALL, "--gossip-delay", "3", "--json", "-")
    assert json.loads(alone.stdout)["config"]["group"] is None


def test_it_fails_if_every_request_does() -> None:
    assert simulate(*SMALL, "--fail", "0:lost:r0", "--fail", "0:lost:r1").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--rps", "1", "--fail", "5:lost:r9"), "replica 'r9' is not there"),
        (("--rps", "1", "--fail", "soon:lost:r0"), "SECONDS:lost|added|restarted|drained:REPLICA"),
        (("--rps", "1", "--profile", "h900"), "no profile is called 'h900'"),
        (("--rps", "1", "--policy", "best"), "unknown policy 'best'"),
        (("--workload", "nope"), "neither a file nor one of"),
        (("--rps", "1", "--kv-tokens", "16"), "at least two blocks"),
    ],
)
def test_what_is_wrong_gets_one_line_and_status_2(arguments: tuple[str, ...], says: str) -> None:
    result = simulate(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr and len(result.stderr.splitlines()) == 1
