"""From capacities to places: who carries most on each workload, and who less than the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import fmean

from preble.lab.compare.plan import BASELINE, ComparePlan
from preble.lab.compare.result import PolicyStanding, Run
from preble.lab.metrics import Summary
from preble.lab.metrics.capacity import Bound, Capacity, CapacitySlo, capacity
from preble.lab.metrics.estimates import Estimate, estimate

_ORDER = (Bound.AT_LEAST, Bound.EXACT, Bound.BELOW)


def run_capacity(slo: CapacitySlo, runs: Sequence[Run]) -> Capacity:
    """Return the capacity that runs of one policy and seed at several rates show."""
    refused = {run.rps for run in runs if not run.is_carried(slo)}
    return capacity([(run.rps, run.judged) for run in runs], slo, refused)


def rates_to_compare(plan: ComparePlan, found: Mapping[str, Sequence[Capacity]]) -> list[float]:
    """Return `loads` times the capacity of the best policy. `found`: policy -> its capacity with each seed."""
    return rates_at(plan, max(fmean(one.rps for one in of_seeds) for of_seeds in found.values()))


def rates_at(plan: ComparePlan, whole_rps: float) -> list[float]:
    """Return `loads` times a rate, ascending. Four digits: enough, and readable."""
    return sorted({float(f"{load * whole_rps:.4g}") for load in plan.loads})


def standings(
    workload: str, found: Mapping[str, Sequence[Capacity]], at_the_highest: Mapping[str, Sequence[Summary]]
) -> list[PolicyStanding]:
    """Return the policies on one workload, the best first. Equal capacities are ordered by mean E2E latency.

    `found`: policy -> its capacity with each seed, the seeds in one order. `at_the_highest`: policy -> its runs at the
    highest rate that all have run at.
    """
    means = {policy: fmean(one.rps for one in of_seeds) for policy, of_seeds in found.items()}

    def place(policy: str) -> tuple[float, int, float]:
        e2e_s = [inf if summary.e2e is None else summary.e2e.mean_s for summary in at_the_highest[policy]]
        return -means[policy], _ORDER.index(_common_bound(found[policy])), fmean(e2e_s)

    return [
        PolicyStanding(
            workload=workload,
            policy=policy,
            rank=rank,
            capacity_rps=estimate([one.rps for one in found[policy]]),
            bound=_common_bound(found[policy]),
            share_of_best=means[policy] / max(means.values()),
            versus_baseline=_versus_baseline(found, policy),
        )
        for rank, policy in enumerate(sorted(found, key=place), start=1)
    ]


def _versus_baseline(found: Mapping[str, Sequence[Capacity]], policy: str) -> Estimate | None:
    """Return capacity / the baseline's − 1, seed by seed; None where that is not known, or not even on which side of
    zero.
    """
    if BASELINE not in found or Bound.EXACT not in (_common_bound(found[policy]), _common_bound(found[BASELINE])):
        return None
    return estimate([own.rps / its.rps - 1 for own, its in zip(found[policy], found[BASELINE], strict=True)])


def _common_bound(of_seeds: Sequence[Capacity]) -> Bound:
    """Return the bound: exact only if it is for every seed."""
    bounds = {one.bound for one in of_seeds}
    return next((bound for bound in (Bound.AT_LEAST, Bound.BELOW) if bound in bounds), Bound.EXACT)
