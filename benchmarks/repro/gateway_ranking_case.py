"""What gateway_ranking.py runs, simulated and through the gateway, and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
from made_by import note

from preble.lab.metrics import Summary
from preble.lab.workloads import WorkloadPlan

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gateway_ranking.json"

PROFILE, REPLICAS = "a6000-mistral-7b", 4
POLICIES = (
    "preble",
    "llmd_blend",
    "sticky_until_saturated",
    "lmetric",
    "e2",
    "dynamo_kv",
    "least_load",
    "round_robin",
)
WORKLOADS = MappingProxyType(
    {
        "tool use": WorkloadPlan(source="toolbench", requests=2700, rps=60.0, seed=10),
        "video": WorkloadPlan(source="video", requests=300, rps=7.0, seed=11),
    }
)
"""Each arrives within 45 s. Of the seeds 10 to 13, those under which the policies differ most."""

SHIFTS = (None, *range(19))
"""A policy is simulated with the arrivals as planned, and with these seeds of what they are shifted by."""

SHIFT_S = 0.02
"""By up to so much each arrival is late then: what a gateway and its sockets may be late by."""


class Cpu(msgspec.Struct, frozen=True):
    """Processors that were busy on average while requests were under way, out of `processors`."""

    gateway: float
    replicas: float
    client: float
    processors: int

    @property
    def share(self) -> float:
        return (self.gateway + self.replicas + self.client) / self.processors


class Run(msgspec.Struct, frozen=True):
    """One policy on one workload. `cpu`: None where it was simulated. `shift`: the seed of what its arrivals were
    shifted by; None for arrivals as planned."""

    plan: WorkloadPlan
    policy: str
    summary: Summary
    cpu: Cpu | None = None
    shift: int | None = None


class Pair(msgspec.Struct, frozen=True):
    """One policy on one workload: through the gateway, and simulated with the arrivals as planned and shifted."""

    policy: str
    measured: Run
    simulated: tuple[Run, ...]


class Results(msgspec.Struct):
    """Every run that was made, those of other plans included."""

    runs: list[Run] = []

    def measured(self, workload: str, policy: str) -> Run | None:
        """The run through the gateway."""
        return next((run for run in self._of(workload, policy) if run.cpu is not None), None)

    def simulated(self, workload: str, policy: str) -> dict[int | None, Run]:
        """By the seed of what the arrivals were shifted by."""
        return {run.shift: run for run in self._of(workload, policy) if run.cpu is None}

    def pairs(self, workload: str) -> list[Pair]:
        """Every policy on one workload; none at all before each was measured and simulated."""
        found = []
        for policy in POLICIES:
            measured, simulated = self.measured(workload, policy), self.simulated(workload, policy)
            if measured is None or simulated.keys() != set(SHIFTS):
                return []
            found.append(Pair(policy, measured, tuple(simulated.values())))
        return found

    def keep(self, run: Run) -> None:
        """Add a run, and write the file as a whole or not at all."""
        self.runs.append(run)
        whole = RESULTS.with_suffix(".part")
        whole.write_bytes(msgspec.json.encode(self))
        whole.replace(RESULTS)
        note("gateway_ranking")

    def _of(self, workload: str, policy: str) -> Sequence[Run]:
        return [run for run in self.runs if (run.plan, run.policy) == (WORKLOADS[workload], policy)]


def known_results() -> Results:
    """What was kept; nothing where there is no file."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Results) if RESULTS.exists() else Results()
