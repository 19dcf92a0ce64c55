"""The decisions of a small simulation, kept as a file: a change of the scheduler shows as a diff of its decisions.

`make golden` writes the file anew; review what changed.
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import msgspec
import pytest

from preble.core.cost_model import CostProfile
from preble.core.policies import policy_names
from preble.core.types import Placement
from preble.sim import Failure, FailureKind, SimConfig, Simulation
from preble.workloads import Segment, Workload, WorkloadRequest
from preble.workloads.trace import made_up_tokens

FOLDER = Path(__file__).parent
PROFILE = CostProfile(
    "golden", "made up", ((0, 0.01), (100, 0.01), (2000, 0.25)), 2e-9, 0.02, 0.0001, 2e-7, 198_516, typical_batch=16
)


def workload() -> Workload:
    """Three tools below one system prompt, a few conversations, and a burst on one document."""
    rng = Random(0)
    system, document = segment("system", 120), segment("document", 900)
    tools = [segment(f"tool {i}", 300 + 40 * i) for i in range(3)]
    requests = [
        WorkloadRequest(
            f"tool-{i}", (system, tools[min(rng.randrange(5), 2)], own(i, 40)), rng.randint(4, 20), arrival_s=0.05 * i
        )
        for i in range(40)
    ]
    requests += [WorkloadRequest(f"burst-{i}", (document, own(100 + i, 60)), 10, arrival_s=1.0) for i in range(24)]
    for i in range(4):
        turns = [segment(f"talk {i} {turn}", 150) for turn in range(3)]
        for turn in range(3):
            requests.append(
                WorkloadRequest(
                    f"talk-{i}-{turn}",
                    tuple(turns[: turn + 1]),
                    12,
                    arrival_s=0.3 * i if turn == 0 else None,
                    session=f"talk-{i}",
                    parent=f"talk-{i}-{turn - 1}" if turn else None,
                    delay_s=0.2,
                )
            )
    return Workload("golden", tuple(requests))


def segment(name: str, num_tokens: int) -> Segment:
    return Segment(name, tokens=made_up_tokens(name, num_tokens))


def own(number: int, num_tokens: int) -> Segment:
    return Segment(tokens=made_up_tokens(f"own {number}", num_tokens))


def decision_log(policy: str) -> str:
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
        kv_tokens=6000,
        failures=(Failure(1.5, FailureKind.RESTARTED, "r1"),),
    )
    simulation = Simulation(config, workload(), on_placement=note)
    simulation.run()
    simulation.check()
    return b"\n".join([*lines, b""]).decode()


@pytest.mark.parametrize("policy", policy_names())
def test_the_decisions_are_those_of_the_golden_file(policy: str) -> None:
    golden = FOLDER / f"simulation.{policy}.jsonl"
    log = decision_log(policy)
    if os.environ.get("PREBLE_REWRITE_GOLDEN"):
        golden.write_text(log, encoding="utf-8")
    assert log == golden.read_text(encoding="utf-8"), "if this change is meant, run `make golden` and review the diff"
