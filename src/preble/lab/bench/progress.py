"""How many requests of a run have ended, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from preble.lab.bench.run import BenchRun
from preble.lab.metrics import RequestRecord
from preble.lab.report.progress import progress


@contextmanager
def request_progress(what: str, num_requests: int) -> Iterator[Callable[[RequestRecord], None]]:
    """Show how many of `num_requests` have ended, and how many failed; yields what to call with each record."""
    done = errors = 0
    with progress(what, "requests") as tell:

        def tick(record: RequestRecord) -> None:
            nonlocal done, errors
            done += 1
            errors += not record.ok
            tell(done, num_requests, f"{errors} failed")

        yield tick


async def run_with_progress(run: BenchRun, what: str) -> None:
    """Make a run, and show its progress."""
    with request_progress(what, run.num_requests) as on_record:
        await run.run(on_record)
