"""A rate that no scheduler can sustain, for comparisons that search no capacity."""

from __future__ import annotations

import msgspec

from preble.lab.compare.plan import Arm, ComparePlan
from preble.lab.compare.search import lattice_rate, start_step
from preble.lab.sim.bound import steady_rate

SAMPLE = 2000
"""Requests of a generated workload that the rate is computed from, at most."""
MOST_ROUNDS = 5
"""How often it is computed at most: it depends on how soon prefixes come again, and thus on itself."""
TOLERANCE = 0.05
"""A part of the rate; rounds that differ by less agree."""


def rate_bound(plan: ComparePlan, workload: str) -> float:
    """Return about the rate that no scheduler can sustain on the plan's cluster, from a sample of the workload.

    Costs seconds at most. Raises: ConfigError, TraceFormatError: the workload cannot be made, or fits no replica.
    """
    slo = plan.slo_of(workload)
    patience_s = max(slo.ttft_p99_s or 0.0, slo.e2e_mean_s or 0.0)
    arm = Arm(workload, plan.contenders[0], plan.seeds[0])
    rate = lattice_rate(start_step(plan.cluster.replicas))
    for _ in range(MOST_ROUNDS):
        asked = plan.cell(arm, rate).workload
        if asked.requests is not None:  # None: all of a file
            asked = msgspec.structs.replace(asked, requests=min(SAMPLE, asked.requests))
        before, rate = rate, steady_rate(asked.make(), plan.cluster, patience_s=patience_s)
        if abs(rate - before) <= TOLERANCE * before:
            break
    return rate
