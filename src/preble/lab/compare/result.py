"""The result of a comparison: one file, that grows run by run and can be gone on with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean

import msgspec

from preble import __version__
from preble.core.types import Target
from preble.errors import ConfigError
from preble.lab.compare.plan import Cell, ComparePlan
from preble.lab.metrics import RequestRecord, Summary
from preble.lab.metrics.capacity import Bound, CapacitySlo
from preble.lab.metrics.estimates import Estimate
from preble.lab.metrics.goodput import Goodput, goodput
from preble.lab.metrics.steady import Steadiness, Verdict, steadiness
from preble.lab.metrics.summary import load_imbalance
from preble.lab.sim import SimResult
from preble.lab.workloads import Workload, WorkloadPlan, WorkloadRequest


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation's numbers. `key`: see `Cell.key`. `label`: the workload's name in the comparison.

    `arrivals_per_s`: all requests, those of sessions that waited for others too, over the time in which the others
    arrived, a second at least. `gpu_s`: seconds of GPU time of all replicas together. `load_imbalance`: see
    `metrics.balance`. `computed_tokens`: prompt tokens computed, again after a preemption included. `reasons`:
    placements by reason. `num_replicated`: replications of prefixes. `steady`: whether it settled, and its numbers over
    time; None in results that were kept before there was such a thing. `goodput`: by class, "" for all together, of the
    requests that came after the warm-up; empty where none has a target. `goodput_of_tenants`: the same by tenant; empty
    where there is one.
    """

    key: str
    label: str
    workload: WorkloadPlan
    policy: str
    arrivals_per_s: float
    summary: Summary
    gpu_s: float
    load_imbalance: float | None
    computed_tokens: int
    preemptions: int
    num_replicated: int
    reasons: dict[str, int]
    steady: Steadiness | None = None
    goodput: dict[str, Goodput] = {}
    goodput_of_tenants: dict[str, Goodput] = {}

    @property
    def judged(self) -> Summary:
        """What counts: of a run that is long enough, what came after its warm-up; else all of it."""
        return self.summary if self.steady is None else self.steady.summary

    def is_carried(self, slo: CapacitySlo) -> bool:
        """Return whether the SLO is kept, and nothing says that a longer run would not keep it."""
        settles = self.steady is None or self.steady.is_carried
        return settles and not self.summary.errors and slo.is_met_by(self.judged)

    @property
    def seed(self) -> int:
        return self.workload.seed

    @property
    def rps(self) -> float:
        """Requests a second that were asked for; those of the trace where it was played as it is."""
        return self.arrivals_per_s if self.workload.rps is None else self.workload.rps

    @classmethod
    def of(cls, cell: Cell, workload: Workload, result: SimResult) -> Run:
        totals = result.replicas.values()
        stopped_s = inf if result.stopped_s is None else result.stopped_s
        times_s = (request.arrival_s or 0.0 for request in workload.openers)
        last_s = max((time_s for time_s in times_s if time_s <= stopped_s), default=0.0)
        steady = _steadiness(cell, result, last_s)
        goodput_by = partial(_goodput, cell, workload, result, steady, last_s)
        tenants = dict.fromkeys(cell.workload.tenants.values())
        return cls(
            key=cell.key,
            label=cell.arm.workload,
            workload=cell.workload,
            policy=cell.arm.policy,
            arrivals_per_s=result.summary.requests / max(last_s, 1.0),
            summary=result.summary,
            gpu_s=result.gpu_s,
            load_imbalance=load_imbalance([replica.gpu_s for replica in totals]),
            computed_tokens=sum(replica.prefill_tokens for replica in totals),
            preemptions=sum(replica.preemptions for replica in totals),
            num_replicated=sum(change.added for change in result.replications),
            reasons=result.reasons,
            steady=steady,
            goodput=goodput_by(cell.workload.classes, cell.workload.class_of),
            goodput_of_tenants=goodput_by(tenants, cell.tenant_of) if tenants else {},
        )


def _steadiness(cell: Cell, result: SimResult, last_s: float) -> Steadiness:
    """Judge what came after the warm-up that the workload itself has; from its first event on, if it has events.

    Events are what such a run is about. A warm-up that is looked for would leave them out of the runs that they harm.
    """
    records = [record for record in result.records if record.scheduled_s >= cell.warm_s] or result.records
    found = steadiness(records, until_s=last_s, least_s=cell.config.window_s, from_s=cell.first_event_s)
    if result.stopped_s is not None and found.verdict is Verdict.SHORT:
        return msgspec.structs.replace(found, verdict=Verdict.GROWING)  # it was stopped because it was overloaded
    return found


def _goodput(
    cell: Cell,
    workload: Workload,
    result: SimResult,
    steady: Steadiness,
    until_s: float,
    groups: Collection[str],
    group_of: Callable[[WorkloadRequest], str],
) -> dict[str, Goodput]:
    """Return it by group, and "" for all together."""
    if not cell.targets:
        return {}
    asked = {request.request_id: request for request in workload.requests}
    from_s = max(until_s - steady.lasted_s + steady.warm_up_s, cell.warm_s)

    def target_of(record: RequestRecord) -> Target:
        return cell.target_of(asked[record.request_id])

    by_group: dict[str, list[RequestRecord]] = {name: [] for name in ("", *groups)}
    for record in result.records:
        if from_s <= record.scheduled_s <= until_s:
            by_group[""].append(record)
            if name := group_of(asked[record.request_id]):
                by_group[name].append(record)
    return {name: goodput(records, target_of, until_s - from_s) for name, records in by_group.items()}


class PolicyStanding(msgspec.Struct, frozen=True, kw_only=True):
    """A policy's place on one workload, first of all by its capacity at the SLO.

    `rank`: from 1. `capacity_rps`: over the seeds. `bound`: whether that is the capacity, or only bounds it.
    `share_of_best`: its capacity / that of the first. `versus_baseline`: its capacity / that of `least_load` − 1, seed
    by seed; None where `least_load` was not run, or neither capacity is known exactly. If one of them is not, it only
    bounds the truth.
    """

    workload: str
    policy: str
    rank: int
    capacity_rps: Estimate
    bound: Bound
    share_of_best: float
    versus_baseline: Estimate | None

    @property
    def is_worse(self) -> bool:
        """Whether it carries less than `least_load` on average."""
        return self.versus_baseline is not None and self.versus_baseline.mean < 0

    @property
    def is_surely_worse(self) -> bool:
        """Whether zero is outside of the 95 % interval, too; one seed is taken at its word."""
        return self.versus_baseline is not None and self.versus_baseline.high < 0


class CompareResult(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison. `is_complete`: nothing of the plan is missing.

    `rates`: by workload, those at which every policy and seed was run. `runs`: all of the plan, by workload, policy,
    rate and seed. `standings`: by workload and rank. `other_runs`: what else the file had, kept for plans to come.
    """

    version: str = __version__
    plan: ComparePlan
    is_complete: bool = False
    rates: dict[str, list[float | None]] = {}
    standings: list[PolicyStanding] = []
    runs: list[Run] = []
    other_runs: list[Run] = []

    def standings_of(self, workload: str) -> list[PolicyStanding]:
        """Return the policies on one workload, the best first."""
        return [standing for standing in self.standings if standing.workload == workload]

    def runs_of(self, workload: str, policy: str) -> dict[float, list[Run]]:
        """Return the runs of every seed by rate, ascending, for the rates at which none is missing. O(all runs)."""
        by_rate: dict[float | None, list[Run]] = {}
        for run in self.runs:
            if (run.label, run.policy) == (workload, policy):
                by_rate.setdefault(run.workload.rps, []).append(run)
        whole = [runs for runs in by_rate.values() if len(runs) == len(self.plan.seeds)]
        return dict(sorted((_common_rate(runs), runs) for runs in whole))


def _common_rate(runs: Sequence[Run]) -> float:
    """Return what was asked for of every seed, or the mean of what they had where arrivals are recorded."""
    asked = runs[0].workload.rps
    return fmean(run.rps for run in runs) if asked is None else asked


def read_result(path: Path) -> CompareResult:
    """Return a result from its file. Raises: ConfigError: it cannot be read, or is something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CompareResult)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{path} is not a result of preble compare ({error}); name another file") from error


def write_result(result: CompareResult, path: Path) -> None:
    """Write the file as a whole or not at all. Raises: ConfigError: it cannot be written."""
    whole = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.write_bytes(msgspec.json.encode(result))
        whole.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def known_runs(path: Path | None) -> dict[str, Run]:
    """Key -> run, of a result file that may not be there yet."""
    if path is None or not path.exists():
        return {}
    result = read_result(path)
    return {run.key: run for run in (*result.runs, *result.other_runs)}
