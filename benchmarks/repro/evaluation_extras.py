"""What docs/bursts.md shows beside the comparisons: the bounds, and latencies around a replica's loss.

Each is computed at one of the rates of its case, with all of its seeds. Kept results are not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from evaluation_cases import CASES, DATA, LOSS_S

from preble.lab.compare import ComparePlan, CompareResult
from preble.lab.compare.numbers import headline_rate
from preble.lab.compare.plan import BASELINE, Arm, Cell
from preble.lab.metrics import RequestRecord, summarize
from preble.lab.sim import simulate
from preble.lab.sim.bound import lower_bound
from preble.lab.sim.memory import fewer_collections
from preble.lab.workloads import WorkloadPlan

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "evaluation"
BOUNDS = RESULTS / "bounds.json"
LOSS = RESULTS / "loss.json"
WARM_S = 10.0
"""What came earlier found empty caches, and counts as neither before nor after."""
JUST_AFTER_S = 15.0
"""How long after a loss a request counts as sent just after it."""


class Extra(Protocol):
    """What is known of one cell: its case, workload and policy say which."""

    @property
    def case(self) -> str: ...
    @property
    def workload(self) -> WorkloadPlan: ...
    @property
    def policy(self) -> str: ...


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """`preble.lab.sim.bound.lower_bound` of a case's workload with one seed, whatever the policy."""

    case: str
    workload: WorkloadPlan
    policy: str
    ttft_mean_s: float
    e2e_mean_s: float
    requests_per_s: float


class Latencies(msgspec.Struct, frozen=True):
    """Of the requests that were sent in some stretch of time and did not fail."""

    ttft_p99_s: float
    e2e_mean_s: float


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """One run in which a replica is lost: how many requests failed, and the latencies before, just after and later."""

    case: str
    workload: WorkloadPlan
    policy: str
    failed: int
    before: Latencies
    just_after: Latencies
    later: Latencies


T = TypeVar("T", bound=Extra)


def bounds(results: Mapping[str, CompareResult]) -> list[Bound]:
    """One for each seed of the main cases that were run, at the highest rate that some policy carries."""
    return _keep(BOUNDS, Bound, bound_cells(results), _bound)


def losses() -> list[Loss]:
    return _keep(LOSS, Loss, loss_cells(), _loss)


def known_bounds(results: Mapping[str, CompareResult]) -> list[Bound]:
    """Those of the page that are there."""
    return _of(_known(BOUNDS, Bound), bound_cells(results))


def known_losses() -> list[Loss]:
    return _of(_known(LOSS, Loss), loss_cells())


def bound_cells(results: Mapping[str, CompareResult]) -> list[Cell]:
    main = [results[case.name] for case in CASES.values() if case.group == "four" and case.name in results]
    rates = [headline_rate(result, *result.plan.workloads) for result in main]
    return [cell for result, rate in zip(main, rates, strict=True) for cell in _cells(result.plan, rate, [BASELINE])]


def loss_cells() -> list[Cell]:
    """At the case's highest rate."""
    case = CASES["lost"]
    return list(_cells(case.plan(DATA), max(case.rates), case.policies))


def _cells(plan: ComparePlan, rate: float, policies: Iterable[str]) -> Iterable[Cell]:
    """Of a plan with one workload: every seed."""
    (workload,) = plan.workloads
    return [plan.cell(Arm(workload, policy, seed), rate) for policy in policies for seed in plan.seeds]


def _bound(cell: Cell) -> Bound:
    found = lower_bound(cell.workload.make(), cell.config)
    return Bound(
        case=cell.arm.workload,
        workload=cell.workload,
        policy=cell.arm.policy,
        ttft_mean_s=found.ttft_mean_s,
        e2e_mean_s=found.e2e_mean_s,
        requests_per_s=found.requests_per_s,
    )


def _loss(cell: Cell) -> Loss:
    with fewer_collections():
        run = simulate(cell.config, cell.workload.make())
    return Loss(
        case=cell.arm.workload,
        workload=cell.workload,
        policy=cell.arm.policy,
        failed=run.summary.errors,
        before=_latencies(run.records, WARM_S, LOSS_S),
        just_after=_latencies(run.records, LOSS_S, LOSS_S + JUST_AFTER_S),
        later=_latencies(run.records, LOSS_S + JUST_AFTER_S, float("inf")),
    )


def _latencies(records: Iterable[RequestRecord], from_s: float, until_s: float) -> Latencies:
    summary = summarize([record for record in records if from_s <= record.scheduled_s < until_s])
    assert summary.ttft is not None and summary.e2e is not None, f"no request was served from {from_s} to {until_s} s"
    return Latencies(summary.ttft.p99_s, summary.e2e.mean_s)


def _keep(path: Path, kind: type[T], cells: list[Cell], make: Callable[[Cell], T]) -> list[T]:
    """What there is of these cells, made where it is missing and kept at once; the file has nothing else in the end."""
    known = {_key(one): one for one in _known(path, kind)}
    for cell in cells:
        if (key := _cell_key(cell)) not in known:
            known[key] = make(cell)
            _write(path, known.values())
    kept = [known[_cell_key(cell)] for cell in cells]
    _write(path, kept)
    return kept


def _write(path: Path, found: Iterable[Extra]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(list(found)), indent=1) + b"\n")


def _known(path: Path, kind: type[T]) -> list[T]:
    return msgspec.json.decode(path.read_bytes(), type=list[kind]) if path.exists() else []  # type: ignore[valid-type]


def _of(known: list[T], cells: list[Cell]) -> list[T]:
    by_key = {_key(one): one for one in known}
    return [by_key[key] for cell in cells if (key := _cell_key(cell)) in by_key]


def _key(one: Extra) -> tuple[str, str, WorkloadPlan]:
    return one.case, one.policy, one.workload


def _cell_key(cell: Cell) -> tuple[str, str, WorkloadPlan]:
    return cell.arm.workload, cell.arm.policy, cell.workload
