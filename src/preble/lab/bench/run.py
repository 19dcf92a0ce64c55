"""One run of the load generator: its settings, its progress and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from preble import __version__
from preble.lab.bench.client import BenchClient
from preble.lab.bench.counters import CacheCounters, read_counters
from preble.lab.bench.load import run_load
from preble.lab.metrics import RequestRecord, Slo, Summary, summarize
from preble.lab.report.progress import progress
from preble.lab.workloads import Workload, WorkloadPlan


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to send (`plan`), where and how; kept in the result, so that a run can be repeated.

    `replicas`: URLs of replicas whose own cache counters are read before and after the run.
    """

    url: str
    plan: WorkloadPlan
    model: str | None = None
    ignore_eos: bool = True
    timeout_s: float = 600.0
    replicas: tuple[str, ...] = ()
    slo: Slo | None = None


class BenchResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one run measured. `partial`: it was interrupted; only the requests that had ended count.

    `engines`: replica URL -> its own counters over the run. `records`: every request, in the order they ended.
    """

    version: str = __version__
    settings: BenchSettings
    workload_note: str
    partial: bool
    summary: Summary
    engines: dict[str, CacheCounters] = {}
    records: list[RequestRecord] = []


class BenchRun:
    """A run that can be interrupted: its result then has what was measured so far."""

    def __init__(
        self, settings: BenchSettings, *, api_key: str | None = None, workload: Workload | None = None
    ) -> None:
        """`workload`: a part of what the plan makes; None for all of it.

        Raises: ConfigError, TraceFormatError: no such workload.
        """
        self._settings = settings
        self._workload = workload or settings.plan.make()
        self._api_key = api_key
        self._records: list[RequestRecord] = []
        self._engines: dict[str, CacheCounters] = {}
        self._is_complete = False

    @property
    def num_requests(self) -> int:
        return len(self._workload.requests)

    async def run(self, on_record: Callable[[RequestRecord], None] = lambda record: None) -> None:
        """Send everything; calls `on_record` with each record, for progress.

        Raises: ConfigError: the endpoint, or a replica in `replicas`, does not answer.
        """
        settings = self._settings
        before = await read_counters(settings.replicas)
        client = BenchClient(
            settings.url,
            model=settings.model,
            api_key=self._api_key,
            ignore_eos=settings.ignore_eos,
            timeout_s=settings.timeout_s,
        )

        def take(record: RequestRecord) -> None:
            self._records.append(record)
            on_record(record)

        async with client:
            await client.find_model()
            await run_load(client, self._workload, take)
        after = await read_counters(settings.replicas)
        self._engines = {url: after[url].since(before[url]) for url in settings.replicas}
        self._is_complete = True

    def result(self) -> BenchResult:
        """Return what has been measured so far."""
        return BenchResult(
            settings=self._settings,
            workload_note=self._workload.note,
            partial=not self._is_complete,
            summary=summarize(self._records, self._settings.slo),
            engines=self._engines,
            records=list(self._records),
        )


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
