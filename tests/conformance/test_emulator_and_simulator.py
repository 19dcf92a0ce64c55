"""What clients of an emulated replica saw, played on a simulated one: the same batches, hits and KV events.

All at the same times: both clocks are virtual, and all times are sums of few powers of two, so that they are equal to
the last digit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from preble.core.costs.model import CostModel, CostProfile
from preble.core.replica.waiting_queue import QueueOrder
from preble.core.types import BlocksStored, KvEvent, PackedTokens, ReplicaId, pack_tokens
from preble.core.types.events import Stored
from preble.decisions.lines import ClearedLine, EvictedLine, Line, StoredLine, line_of
from preble.decisions.names import LogNames
from preble.decisions.reader import LogReader
from preble.emulator.config import EmulatorConfig
from preble.emulator.engine import EmulatedEngine
from preble.emulator.generation import Prompt
from preble.lab.metrics import RequestRecord
from preble.lab.metrics.itl import gap_key
from preble.lab.sim import SimConfig, SimResult, Simulation
from preble.lab.workloads import Segment, Workload, WorkloadRequest
from support.logs import Recording
from support.virtual_time import VirtualTimeLoop

PROFILE = CostProfile(
    "dyadic",
    "powers of two",
    ((0, 2**-7), (1024, 2**-7 + 1)),
    2**-22,
    2**-5,
    2**-10,
    2**-16,
    1024,
    typical_batch=1,
    request_overhead_s=2**-8,
)
SESSIONS, TURNS = 10, 5
TICK = 2**-24
"""Smaller than what any iteration is a multiple of, so that nobody arrives in the instant of one's end."""


class Numbers:
    """The seam to a tokenizer: what is generated are numbers from 5000 on, and their text says which."""

    output_ids = range(5000, 5037)
    output_pieces = tuple(f" {number}" for number in output_ids)


class Publisher:
    """The seam to the network: keeps what would be published, with its time."""

    def __init__(self) -> None:
        self.published: list[tuple[float, KvEvent]] = []

    async def publish(self, events: Iterable[KvEvent], _copies: object = ()) -> None:
        now = asyncio.get_running_loop().time()
        self.published += [(now, event) for event in events]


class Emulated:
    """Clients that talk with one emulated replica, each its own conversation, and what became of it."""

    def __init__(self, order: QueueOrder) -> None:
        config = EmulatorConfig(
            profile=PROFILE.name, block_size=8, max_batch_tokens=64, max_running=8, kv_tokens=768, order=order
        )
        self.publisher = Publisher()
        self.engine = EmulatedEngine(config, CostModel(PROFILE), Numbers(), self.publisher)  # type: ignore[arg-type]
        self.requests: list[WorkloadRequest] = []
        self.records: dict[str, RequestRecord] = {}

    async def run(self) -> None:
        async with self._running(), asyncio.TaskGroup() as clients:
            for i in range(SESSIONS):
                clients.create_task(self._converse(i, Random(i)))

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        loop = asyncio.create_task(self.engine.run())
        yield
        loop.cancel()

    async def _converse(self, session: int, rng: Random) -> None:
        """Ask, wait for the answer, think, ask again with all that was said. The last answer is a single token."""
        system = range(1000 + session % 3 * 100, 1000 + session % 3 * 100 + rng.randrange(8, 60))
        said = [*system]
        for turn in range(TURNS):
            said += [rng.randrange(2000, 3000) for _ in range(rng.randrange(1, 40))]
            delay_s = rng.randrange(1, 1 << 9) * 2**-9 + (session * TURNS + turn) * TICK
            await asyncio.sleep(delay_s)
            output_tokens = 1 if turn == TURNS - 1 else rng.randrange(2, 30)
            said += await self._ask(session, turn, pack_tokens(said), output_tokens, delay_s)

    async def _ask(
        self, session: int, turn: int, prompt: PackedTokens, output_tokens: int, delay_s: float
    ) -> list[int]:
        """The answer's token ids. Notes the request for a trace, and its record."""
        name, loop = f"{session}.{turn}", asyncio.get_running_loop()
        self.requests.append(
            WorkloadRequest(
                name,
                (Segment(tokens=prompt),),
                output_tokens,
                arrival_s=None if turn else loop.time(),
                session=str(session),
                parent=f"{session}.{turn - 1}" if turn else None,
                delay_s=delay_s if turn else 0.0,
            )
        )
        token_ids: list[int] = []
        times_s: list[float] = []
        with self.engine.generate([Prompt(prompt, output_tokens)]) as generation:
            async for pieces in generation.pieces():
                token_ids += [int(piece.text) for piece in pieces]
                times_s += [loop.time()] * len(pieces)
                finished = pieces[-1].finished
        assert finished is not None and loop.time() == finished.finished_at
        self.records[name] = RequestRecord(
            request_id=name,
            scheduled_s=finished.arrived_at,
            sent_s=finished.arrived_at,
            first_token_s=finished.first_token_at,
            end_s=finished.finished_at,
            prompt_tokens=finished.num_prompt_tokens,
            output_tokens=len(token_ids),
            cached_tokens=finished.num_cached_tokens,
            replica="r0",
            reason="policy",
            gaps=Counter(gap_key(after - before) for before, after in pairwise(times_s)),
        )
        return token_ids

    def workload(self) -> Workload:
        return Workload("recorded", tuple(self.requests))


def simulated(order: QueueOrder, asked: Workload, path: Path) -> tuple[SimResult, list[Line]]:
    """The same requests on one simulated replica, whose KV events are reported at once; and these, as logged."""
    config = SimConfig(
        profile=PROFILE,
        replicas=1,
        policy="round_robin",
        block_size=8,
        max_batch_tokens=64,
        max_running=8,
        kv_tokens=768,
        order=order,
        event_delay_s=0.0,
    )
    recording = Recording(config.scheduler_settings, profile=PROFILE)
    simulation = Simulation(config, asked, scheduler=recording.scheduler)
    result = simulation.run()
    simulation.check()
    events = [numbered.event for numbered in LogReader(recording.written_to(path))]
    return result, [event for event in events if isinstance(event, StoredLine | EvictedLine)]


def as_logged(time_s: float, event: KvEvent) -> StoredLine | EvictedLine | ClearedLine:
    """An event of the emulator as the simulation logs one of its replica r0."""
    names, event = LogNames(), replace(event, replica_id=ReplicaId("r0"))
    line = line_of(names, time_s, Stored(event, located=True) if isinstance(event, BlocksStored) else event)
    assert isinstance(line, StoredLine | EvictedLine | ClearedLine)
    return line


@pytest.mark.parametrize("order", QueueOrder)
def test_the_simulator_repeats_what_the_emulator_did(order: QueueOrder, tmp_path: Path) -> None:
    emulated = Emulated(order)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(emulated.run())
    result, events = simulated(order, emulated.workload(), tmp_path / "log.jsonl")
    assert {record.request_id: record for record in result.records} == emulated.records
    # A simulation is over with its last request; what that one stored is reported to nobody.
    end_s = max(record.end_s for record in result.records)
    published = [as_logged(time_s, event) for time_s, event in emulated.publisher.published if time_s < end_s]
    assert events == published
    assert_it_had_everything(result, events, emulated.records)


def assert_it_had_everything(result: SimResult, events: list[Line], records: dict[str, RequestRecord]) -> None:
    """Preemptions, evictions, and answers that the next turn found in the cache."""
    assert result.replicas["r0"].preemptions > 0
    assert {type(event) for event in events} == {StoredLine, EvictedLine}
    hits = [
        (record.cached_tokens, records[f"{i}.{turn - 1}"].prompt_tokens)
        for i in range(SESSIONS)
        for turn in range(1, TURNS)
        if (record := records[f"{i}.{turn}"]).cached_tokens
    ]
    assert sum(cached > prompt_before for cached, prompt_before in hits if cached is not None) >= SESSIONS
