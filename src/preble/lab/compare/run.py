"""Making the runs of a comparison: in several processes, each result kept as soon as it is there."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

import msgspec

from preble.lab.compare.plan import Arm, Cell, ComparePlan
from preble.lab.compare.ranking import rates_at, rates_to_compare, run_capacity, standings
from preble.lab.compare.rate_bound import rate_bound
from preble.lab.compare.result import CompareResult, PolicyStanding, Run, known_runs, write_result
from preble.lab.compare.search import TYPICAL_RUNS, follow, nearest_step, start_step
from preble.lab.compare.workers import Pool, run_cell, workers
from preble.lab.metrics import Summary
from preble.lab.metrics.capacity import Capacity


def compare_policies(
    plan: ComparePlan,
    *,
    path: Path | None = None,
    jobs: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> CompareResult:
    """Make every run of the plan, and rank the policies. The same plan gives the same result, for any number of jobs.

    `path`: the result file. Runs that it has already are not made again, and it is written after each one, so that an
    interrupted comparison goes on where it was. `jobs`: processes, None for one a core; more than one needs the
    caller's main module to be importable (`if __name__ == "__main__":`). `on_progress`: called with how many are
    made and how many it will be, which is an estimate while capacities are searched.

    Raises: ConfigError, TraceFormatError: a workload cannot be made, `path` is something else, or the caller's main
    module is not importable. PrebleError: a process died.
    """
    comparison = _Comparison(plan, path, on_progress)
    with workers(jobs) as pool:
        return comparison.run(pool)


class _Comparison:
    """One comparison on its way. `_known`: what the file had; `_runs`: what the plan has asked for, by key."""

    def __init__(self, plan: ComparePlan, path: Path | None, on_progress: Callable[[int, int], None]) -> None:
        self._plan = plan
        self._path = path
        self._on_progress = on_progress
        self._known = known_runs(path)
        self._runs: dict[str, Run] = {}
        self._rates: dict[str, list[float | None]] = {}
        self._num_made = 0
        self._left: Counter[Arm] = Counter()
        """Return the runs that are known to be missing."""

    def run(self, pool: Pool) -> CompareResult:
        if self._plan.is_search:
            self._search(pool)
        for workload in self._plan.workloads:
            self._rates[workload] = self._rates_of(workload)
        self._grid(pool, self._rates)
        places = [place for workload, of_it in self._rates.items() for place in self._standings(workload, of_it)]
        result = self._result(self._rates, places, is_complete=True)
        self._write(result)
        return result

    # -- phases -------------------------------------------------------------------------------------------------------

    def _search(self, pool: Pool) -> None:
        """Find every policy's capacity on every workload: with the first seed, then near it with all others."""
        num_loads = len(self._plan.loads)

        def next_cells(arm: Arm) -> list[Cell]:
            tried, rate = self._tried(arm)
            self._left[arm] = num_loads + (0 if rate is None else max(1, TYPICAL_RUNS - len(tried)))
            return [] if rate is None else [self._plan.cell(arm, rate)]

        for is_first in (True, False):
            arms = [arm for arm in self._plan.arms() if (arm.seed == self._plan.seeds[0]) is is_first]
            self._make(pool, [cell for arm in arms for cell in next_cells(arm)], lambda cell: next_cells(cell.arm))

    def _tried(self, arm: Arm) -> tuple[list[float], float | None]:
        """Return the rates that the search of this arm has tried, and the one to try next, if any."""

        def holds_at(rate: float) -> bool | None:
            run = self._find(self._plan.cell(arm, rate))
            return None if run is None else run.is_carried(self._plan.slo_of(arm.workload))

        start = start_step(self._plan.cluster.replicas, is_cut_short=self._plan.lasting_s is not None)
        if arm.seed == self._plan.seeds[0]:
            return follow(start, holds_at)
        first = run_capacity(
            self._plan.slo_of(arm.workload), self._deciding_runs(arm._replace(seed=self._plan.seeds[0]))
        )
        return follow(nearest_step(first.rps) if first.rps else start, holds_at, is_near=first.rps > 0)

    def _grid(self, pool: Pool, rates: Mapping[str, Sequence[float | None]]) -> None:
        """Run every policy and seed at every rate."""
        missing = [cell for cell in self._plan.cells(rates) if self._find(cell) is None]
        self._left = Counter(cell.arm for cell in missing)

        def count_down(cell: Cell) -> list[Cell]:
            self._left[cell.arm] -= 1
            return []

        self._make(pool, missing, count_down)

    def _make(self, pool: Pool, cells: Iterable[Cell], then: Callable[[Cell], list[Cell]]) -> None:
        """Make the runs of these cells, and of those that `then` says follow from one that was made."""
        waiting = deque(cells)
        pending: dict[Future[Run], Cell] = {}
        self._report()
        while waiting or pending:
            while waiting and len(pending) < pool.size:
                cell = waiting.popleft()
                pending[pool.executor.submit(run_cell, cell)] = cell
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                cell = pending.pop(future)
                self._keep(future.result())
                waiting.extend(then(cell))
                self._report()

    # -- results ------------------------------------------------------------------------------------------------------

    def _find(self, cell: Cell) -> Run | None:
        """Return the cell's run, if there is one; from now on it is one of this comparison's."""
        run = self._known.get(cell.key)
        if run is not None:
            self._runs[cell.key] = msgspec.structs.replace(run, label=cell.arm.workload)
        return self._runs.get(cell.key)

    def _keep(self, run: Run) -> None:
        self._known[run.key] = self._runs[run.key] = run
        self._num_made += 1
        self._write(self._result({}, (), is_complete=False))

    def _rates_of(self, workload: str) -> list[float | None]:
        """Return the rates at which every policy is run, ascending."""
        if self._plan.is_search:
            return [*rates_to_compare(self._plan, self._capacities(workload))]
        if self._plan.rates:
            return sorted(self._plan.rates, key=lambda rate: rate or 0.0)
        return [*rates_at(self._plan, rate_bound(self._plan, workload))]

    def _capacities(self, workload: str) -> dict[str, list[Capacity]]:
        """Return each policy's capacity with each seed."""
        slo = self._plan.slo_of(workload)
        found: dict[str, list[Capacity]] = {}
        for arm in self._plan.arms():
            if arm.workload == workload:
                found.setdefault(arm.policy, []).append(run_capacity(slo, self._deciding_runs(arm)))
        return found

    def _deciding_runs(self, arm: Arm) -> list[Run]:
        """Return the runs that decide a capacity: those of the search, or else those at the given rates."""
        rates = self._tried(arm)[0] if self._plan.is_search else self._rates[arm.workload]
        cell = self._plan.cell if self._plan.is_search else self._plan.grid_cell
        return [self._runs[cell(arm, rate).key] for rate in rates]

    def _standings(self, workload: str, rates: Sequence[float | None]) -> list[PolicyStanding]:
        at_the_highest: dict[str, list[Summary]] = {}
        for cell in self._plan.cells({workload: rates[-1:]}):
            at_the_highest.setdefault(cell.arm.policy, []).append(self._runs[cell.key].judged)
        return standings(workload, self._capacities(workload), at_the_highest)

    def _result(
        self, rates: Mapping[str, list[float | None]], places: Iterable[PolicyStanding], *, is_complete: bool
    ) -> CompareResult:
        workloads, policies = list(self._plan.workloads), (*self._plan.contenders, *self._plan.promising)
        runs = sorted(
            self._runs.values(),
            key=lambda run: (workloads.index(run.label), policies.index(run.policy), run.rps, run.seed),
        )
        return CompareResult(
            plan=self._plan,
            is_complete=is_complete,
            rates=dict(rates),
            standings=list(places),
            runs=runs,
            other_runs=[run for key, run in self._known.items() if key not in self._runs],
        )

    def _write(self, result: CompareResult) -> None:
        if self._path is not None:
            write_result(result, self._path)

    def _report(self) -> None:
        self._on_progress(self._num_made, self._num_made + sum(self._left.values()))
