"""The same warm-up for every arm, so that what an engine does only once slows no measured request."""

from __future__ import annotations

import random
from collections.abc import Sequence

from preble.errors import EngineProtocolError
from preble.lab.bench.client import BenchClient
from preble.lab.bench.load import run_load
from preble.lab.metrics import RequestRecord
from preble.lab.workloads import Segment, Workload, WorkloadRequest

NUM_REQUESTS = 6
"""Prompts of different lengths, the last one twice, so that one request finds its prefix cached."""


async def warm_up(urls: Sequence[str], model: str | None = None) -> None:
    """Send each replica the same prompts at once; they share nothing with any workload.

    Raises: EngineProtocolError: one failed. ConfigError: a replica does not answer.
    """
    for url in urls:
        records: list[RequestRecord] = []
        async with BenchClient(url, model=model, timeout_s=300.0) as client:
            await client.find_model()
            await run_load(client, warm_up_workload(), records.append)
        failed = [record.error for record in records if not record.ok]
        if failed:
            raise EngineProtocolError(f"replica {url} failed a warm-up request: {failed[0]}", replica_id=url)


def warm_up_workload() -> Workload:
    """Return prompts of made-up words; the longest comes twice."""
    rng = random.Random("warm-up")
    texts = ["".join(rng.choices("bcdfghjklmnpqrstvwxz ", k=200 * 2**i)) for i in range(NUM_REQUESTS - 1)]
    requests = (
        WorkloadRequest(f"warm-up-{i}", (Segment(text=text),), 24, arrival_s=0.1 * i)
        for i, text in enumerate([*texts, texts[-1]])
    )
    return Workload("warm-up", tuple(requests))
