"""The open loop: every request is sent at its time, whether or not earlier ones have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from preble.lab.bench.client import BenchClient
from preble.lab.metrics import RequestRecord
from preble.lab.workloads import Workload, WorkloadRequest


async def run_load(client: BenchClient, workload: Workload, on_record: Callable[[RequestRecord], None]) -> None:
    """Send the whole workload; calls `on_record` with each record when its request ends.

    A request with a parent is sent after its parent's answer: the loop is closed inside a session and open between
    sessions. Cancelling aborts every request in flight; those have no record.
    """
    await _Load(client, workload, on_record).run()


class _Load:
    """One run. Times are in seconds since its start."""

    def __init__(self, client: BenchClient, workload: Workload, on_record: Callable[[RequestRecord], None]) -> None:
        self._client = client
        self._openers = sorted(workload.openers, key=lambda request: request.arrival_s or 0.0)
        self._on_record = on_record
        self._children = workload.children()

    async def run(self) -> None:
        self._start = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as self._tasks:
            for request in self._openers:
                scheduled_s = request.arrival_s or 0.0
                await self._sleep_until(scheduled_s)
                self._tasks.create_task(self._send(request, scheduled_s))

    def _clock(self) -> float:
        return asyncio.get_running_loop().time() - self._start

    async def _sleep_until(self, time_s: float) -> None:
        delay = time_s - self._clock()
        if delay > 0:
            await asyncio.sleep(delay)

    async def _send(self, request: WorkloadRequest, scheduled_s: float) -> None:
        record = await self._client.send(request, scheduled_s, self._clock)
        self._on_record(record)
        for child in self._children.get(request.request_id, ()):
            if record.ok:
                self._tasks.create_task(self._send_later(child, record.end_s + child.delay_s))
            else:
                self._give_up(child)

    async def _send_later(self, child: WorkloadRequest, earliest_s: float) -> None:
        scheduled_s = max(earliest_s, child.arrival_s or 0.0)
        await self._sleep_until(scheduled_s)
        await self._send(child, scheduled_s)

    def _give_up(self, request: WorkloadRequest) -> None:
        """Record a request and all that wait for it as failed, because its parent failed."""
        now = self._clock()
        self._on_record(
            RequestRecord(request_id=request.request_id, scheduled_s=now, sent_s=now, end_s=now, error="parent failed")
        )
        for child in self._children.get(request.request_id, ()):
            self._give_up(child)
