"""Where the runs of a comparison are made: this process, or several others."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from preble import background
from preble.errors import ConfigError, PrebleError
from preble.lab.compare.early import watch_of
from preble.lab.compare.plan import Cell
from preble.lab.compare.result import Run
from preble.lab.sim import simulate
from preble.lab.sim.memory import fewer_collections
from preble.lab.workloads import Workload, WorkloadPlan


class Pool(NamedTuple):
    """`size`: how many runs at once."""

    executor: Executor
    size: int


def run_cell(cell: Cell) -> Run:
    """Make one run. Raises: ConfigError, TraceFormatError: its workload cannot be made."""
    workload = _workload(cell.workload, cell.file_digests)
    with fewer_collections():
        target_of = cell.target_of if cell.promises else None
        result = simulate(cell.config, workload, watch=watch_of(cell), target_of=target_of, tenant_of=cell.tenant_of)
        return Run.of(cell, workload, result)


@lru_cache(maxsize=2)
def _workload(plan: WorkloadPlan, file_digests: tuple[str, ...]) -> Workload:
    """Make the workload once for the policies that play it, one after another. `file_digests`: so that a changed file
    is seen.
    """
    return plan.make()


class _Here(Executor):
    """Runs what is submitted at once, in this process."""

    def submit(self, fn: Callable[..., Run], /, *args: object, **kwargs: object) -> Future[Run]:  # type: ignore[override]
        future: Future[Run] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextmanager
def workers(jobs: int | None) -> Iterator[Pool]:
    """Yield processes to make runs in, None for one a core; none of them is left behind, whichever way this ends.

    One job needs no process but this one. Raises: PrebleError: a process died. ConfigError: fewer than one job, or the
    running script would start over in each process.
    """
    if jobs is None:
        jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if jobs < 1:
        raise ConfigError(f"compare: jobs must be at least 1, got {jobs}")
    if jobs == 1:
        yield Pool(_Here(), 1)
        return
    _require_main_guard()
    others = set(multiprocessing.active_children())
    # Fresh processes: a fork of one that has threads (a progress bar) may hang.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=background.end_with_parent)
    try:
        yield Pool(pool, jobs)
    except BrokenProcessPool as error:
        raise PrebleError("a process that made a run has died, out of memory perhaps; try fewer jobs") from error
    finally:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        pool.shutdown(cancel_futures=True)


def _require_main_guard() -> None:
    """Raises: ConfigError: a new process imports the running script, which would begin this comparison again."""
    main = sys.modules["__main__"]
    script = Path(getattr(main, "__file__", None) or "")
    if getattr(main, "__spec__", None) is not None or script.suffix != ".py" or not script.is_file():
        return  # `python -m`, a console script, an interpreter
    if "__name__" not in script.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(
            f"compare makes its runs in new processes, and each of them would run {script} again: write "
            'if __name__ == "__main__": above the lines that compare, or pass jobs=1'
        )
