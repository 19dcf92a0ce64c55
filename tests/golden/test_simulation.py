"""The decisions of a small simulation, kept as a file: a change of the scheduler shows as a diff of its decisions.

`make golden` writes the file; review what changed.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from preble.core.policies.registry import policy_names
from preble.core.types import Placement
from preble.lab.sim import Failure, FailureKind, SimConfig, Simulation
from preble.lab.workloads import Workload
from support.small_cluster import PROFILE, long_and_short, workload

FOLDER = Path(__file__).parent


def decision_log(policy: str, requests: Workload, kv_tokens: int) -> str:
    """A line a placement: when, who, where, why, and what each candidate would have cost."""
    lines: list[bytes] = []

    def note(placement: Placement, now: float) -> None:
        costs = {
            c.replica_id: [round(s, 6) for s in (c.load_s, c.eviction_s, c.prefill_s)] for c in placement.candidates
        }
        line = [round(now, 6), placement.request_id, placement.replica_id, placement.reason, placement.matched_tokens]
        lines.append(msgspec.json.encode([*line, costs]))

    config = SimConfig(
        profile=PROFILE,
        replicas=3,
        policy=policy,
        kv_tokens=kv_tokens,
        failures=(Failure(1.5, FailureKind.RESTARTED, "r1"),),
    )
    simulation = Simulation(config, requests, on_placement=note)
    simulation.run()
    simulation.check()
    return b"\n".join([*lines, b""]).decode()


@pytest.mark.parametrize("policy", policy_names())
def test_the_decisions_are_those_of_the_golden_file(policy: str) -> None:
    _compare(FOLDER / f"simulation.{policy}.jsonl", decision_log(policy, workload(), kv_tokens=6000))


def test_the_decisions_of_preble_are_those_of_the_golden_file_where_prompts_differ_in_length() -> None:
    """With the run above, this is what tells one `preble` from another (benchmarks/repro/made_by.py)."""
    _compare(FOLDER / "simulation.preble.lengths.jsonl", decision_log("preble", long_and_short(), kv_tokens=20_000))


def _compare(golden: Path, log: str) -> None:
    if os.environ.get("PREBLE_REWRITE_GOLDEN"):
        golden.write_text(log, encoding="utf-8")
    assert log == golden.read_text(encoding="utf-8"), "if this change is meant, run `make golden` and review the diff"
