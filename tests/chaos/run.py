"""One run: a cluster under load, the script, and what is left at the end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from chaos.clients import Clients, Cut, Questions
from chaos.faults import Faults
from chaos.fleet import KEYS, TINY_MODEL, Cluster, emulated, real_vllm
from chaos.script import KINDS, steps
from preble.emulator.answers.tokenizer import load_tokenizer
from support.waiting import eventually

SAMPLES = 120
"""Of memory and open files, over the whole run."""
SPARE_FILES = 16
"""More open files for each replica than at the beginning that are no leak: idle connections, kept for 4 s."""
LEFT_OVER = ("preble_in_flight", "preble_prompts_admitted", "preble_prompts_queued", "preble_body_bytes")
"""Metrics that are 0 when nothing runs."""


def spare_files(plan: Plan) -> int:
    return SPARE_FILES * (plan.replicas + plan.vllm)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run.

    `hold`, `calm`: requests that end during a fault, and between two. `minutes`: None for one round of the script.
    `at_once`: requests in flight at most, on a machine that cannot keep the rate.
    `speed`: of the emulated replicas, as a multiple of their profile's. `kinds`: of faults.
    """

    seed: int = 1
    minutes: float | None = None
    rate: float = 50.0
    at_once: int = 400
    replicas: int = 4
    vllm: int = 0
    hold: int = 100
    calm: int = 100
    speed: float = 1.0
    kinds: tuple[str, ...] = KINDS


class Footprint(msgspec.Struct, frozen=True):
    """What a gateway holds at a time. `generation`: which gateway of the run. `at_s`: since the run began."""

    generation: int
    at_s: float
    memory_mb: float
    open_files: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a run found.

    `ends`: how the steady clients' requests ended; `flood`: how the flood's did. `lost`: answers that had begun on a
    replica that was killed, stopped or told to cut them; `lost_otherwise`: others. `left_over`: metrics that are not 0
    although nothing runs. `first_idle`: the first gateway before its first request. `last_idle`: the last gateway when
    it took over, and at the end with nothing running. `late_s`: how late a request was sent at most.
    """

    plan: Plan
    seconds: float
    requests: int
    ends: dict[str, int]
    lost: int
    lost_otherwise: list[Cut]
    wrong: int
    failed: int
    refused: int
    faults: dict[str, int]
    flood: dict[str, int]
    left_over: dict[str, float]
    first_idle: Footprint
    last_idle: list[Footprint]
    footprints: list[Footprint]
    first_byte_p50_s: float
    first_byte_p99_s: float
    whole_p50_s: float
    whole_p99_s: float
    late_s: float
    examples: list[str]

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, wrong or left over that had no right to be."""
        bad = self.lost_otherwise or self.wrong or self.failed or self.refused or self.left_over
        before, after = self.last_idle
        return not bad and after.open_files <= before.open_files + spare_files(self.plan)


async def run(plan: Plan, folder: Path, say: Callable[[str], None]) -> Result:
    """`folder`: for logs. Raises: AssertionError: a fault had no end, or the gateway ended."""
    tokenizer = TINY_MODEL if plan.vllm else None
    *fleet, guest = [emulated(i, folder, plan.speed, tokenizer) for i in range(plan.replicas + 1)]
    names = [replica.name for replica in (*fleet, guest)]
    fleet += real_vllm(plan.vllm, folder)
    questions = Questions(plan.seed, load_tokenizer(str(tokenizer) if tokenizer else None))
    async with Cluster(folder, fleet, guest) as cluster, Clients(cluster.url, KEYS, questions, names) as clients:
        return await Run(plan, cluster, clients, say).run()


class Run:
    def __init__(self, plan: Plan, cluster: Cluster, clients: Clients, say: Callable[[str], None]) -> None:
        self._plan, self._cluster, self._clients, self._say = plan, cluster, clients, say
        self._faults = Faults(cluster, clients, plan.hold)
        self._calm = Faults(cluster, clients, plan.calm)
        self._done: Counter[str] = Counter()
        self._footprints: list[Footprint] = []
        self._started = time.monotonic()

    async def run(self) -> Result:
        await self._faults.all_back()
        first = newest = self._footprint()
        load = asyncio.create_task(self._clients.run(self._plan.rate, self._plan.at_once))
        sampling = asyncio.create_task(self._sample())
        try:
            newest = await self._go_through_script(newest)
        finally:
            load.cancel()
            sampling.cancel()
            await asyncio.gather(load, sampling, return_exceptions=True)
        await self._clients.finish()
        return await self._result(first, newest)

    async def _go_through_script(self, newest: Footprint) -> Footprint:
        """Return the footprint of the last gateway at its beginning."""
        ends_at = self._started + 60 * (self._plan.minutes or 0.0)
        for number, step in enumerate(steps(self._plan.seed, len(self._cluster.replicas), self._plan.kinds)):
            if (number >= len(self._plan.kinds) and self._plan.minutes is None) or (
                self._plan.minutes and time.monotonic() > ends_at
            ):
                break
            self._say(
                f"{self._elapsed():7.1f} s {self._clients.tally.num_ended:8d} requests  {step.kind} {step.replica}"
            )
            await self._faults.do(step)
            self._done[step.kind] += 1
            await self._calm.served()
            if step.kind == "restart":
                newest = self._footprint()
        return newest

    def _elapsed(self) -> float:
        return round(time.monotonic() - self._started, 1)

    def _footprint(self) -> Footprint:
        gateway = self._cluster.gateway
        return Footprint(self._cluster.num_gateways, self._elapsed(), gateway.memory_mb(), gateway.open_files())

    async def _sample(self) -> None:
        while True:
            self._footprints.append(self._footprint())
            await asyncio.sleep(max(60 * (self._plan.minutes or 1.0) / SAMPLES, 0.5))

    async def _result(self, first: Footprint, newest: Footprint) -> Result:
        tally, seconds = self._clients.tally, self._elapsed()
        await eventually(self._is_idle, "nothing is in flight", timeout_s=60.0)
        excused = [cut for cut in tally.cuts if self._is_excused(cut)]
        others = [cut for cut in tally.cuts if cut not in excused]
        most = first.open_files + spare_files(self._plan)
        await eventually(lambda: self._footprint().open_files <= most, "files are closed")
        return Result(
            plan=self._plan,
            seconds=seconds,
            requests=tally.num_ended,
            ends=dict(tally.ends),
            lost=len(excused),
            lost_otherwise=others,
            wrong=tally.ends["wrong"],
            failed=tally.ends["failed"],
            refused=tally.ends["refused"],
            faults=dict(self._done),
            flood=self._faults.flooded,
            left_over=await self._left_over(),
            first_idle=first,
            last_idle=[newest, self._footprint()],
            footprints=self._footprints,
            first_byte_p50_s=percentile(tally.first_s, 0.5),
            first_byte_p99_s=percentile(tally.first_s, 0.99),
            whole_p50_s=percentile(tally.whole_s, 0.5),
            whole_p99_s=percentile(tally.whole_s, 0.99),
            late_s=round(tally.latest_s, 3),
            examples=tally.examples,
        )

    async def _left_over(self) -> dict[str, float]:
        metrics = await self._faults.metrics()
        return {name: metrics[name] for name in LEFT_OVER if metrics[name]}

    async def _is_idle(self) -> bool:
        return not await self._left_over()

    def _is_excused(self, cut: Cut) -> bool:
        suspects = [one for one in self._cluster.replicas if cut.replica in (one.name, "")]
        return any(since <= cut.ended_at and cut.began_at <= until for one in suspects for since, until in one.spells)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(int(len(ordered) * share), len(ordered) - 1)], 3) if ordered else 0.0
