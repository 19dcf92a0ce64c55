"""What a simulation found."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from preble import __version__
from preble.lab.metrics import RequestRecord, Summary
from preble.lab.sim.config import SimConfig
from preble.lab.sim.replica import SimReplica
from preble.lab.sim.timeline import ReplicaSeries
from preble.lab.workloads import WorkloadPlan


class ReplicationRecord(msgspec.Struct, frozen=True):
    """A prefix of `prefix_tokens` tokens got a further replica (`added`) or lost one; `num_replicas` serve it now."""

    time_s: float
    prefix_tokens: int
    replica: str
    added: bool
    num_replicas: int


class ReplicaTotals(msgspec.Struct):
    """One replica over the whole run, restarts included.

    `gpu_s`: seconds in which it computed. `prefill_tokens`: prompt tokens computed, again after a preemption included.
    `copies`, `copied_tokens`: what it got from other replicas.
    """

    gpu_s: float = 0.0
    iterations: int = 0
    prefill_tokens: int = 0
    hit_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    copies: int = 0
    copied_tokens: int = 0

    def add(self, replica: SimReplica) -> None:
        self.gpu_s += replica.busy_s
        self.iterations += replica.num_iterations
        self.prefill_tokens += replica.prefill_tokens
        self.hit_tokens += replica.local.stats.prefix_hits
        self.generated_tokens += replica.local.stats.generated_tokens
        self.preemptions += replica.local.stats.preemptions
        self.copies += replica.num_copies
        self.copied_tokens += replica.copied_tokens


class SimResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    `plan`: how the workload was made, where it was made by a plan. `policy`: name of the one that placed; not always
    the one that `config` names, for `simulate` may be given another. `gpu_s`: seconds of GPU time of all replicas
    together. `reasons`: placements by reason. `replications`: of prefixes, and retirements, in order. `timeline`: by
    replica; empty unless asked for. `stopped_s`: when a watch had seen enough, so that nothing more began; None for a
    run to the end. `records`: every request, in the order they ended.
    """

    version: str = __version__
    workload: str
    workload_note: str
    plan: WorkloadPlan | None = None
    config: SimConfig
    policy: str
    summary: Summary
    gpu_s: float
    reasons: dict[str, int]
    replicas: dict[str, ReplicaTotals]
    replications: list[ReplicationRecord] = []
    timeline: dict[str, ReplicaSeries] = {}
    stopped_s: float | None = None
    records: list[RequestRecord] = []


def totals_by_name(replicas: Iterable[SimReplica]) -> dict[str, ReplicaTotals]:
    """Return the totals of each name; one name may have had several replicas."""
    totals: dict[str, ReplicaTotals] = {}
    for replica in replicas:
        totals.setdefault(replica.replica_id, ReplicaTotals()).add(replica)
    return totals
