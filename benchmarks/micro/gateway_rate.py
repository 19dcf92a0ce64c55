"""The rate that a gateway bears: at which the p99 of added time passes 50 ms. And what it adds at half of that rate.

Open loop: whole answers to 8 KB of text, asked for at the seeded times of a Poisson process whether or not earlier
answers have come. A time counts from when the request was due. The replicas are those of gateway_cost.py: they compute
nothing, and publish KV events. A search doubles the rate until the p99 is above 50 ms and then halves the interval,
on a logarithmic scale. Each gateway is searched in each round, in turn; the page shows the median round. The quantile
of asking a replica directly, at 1,000 requests a second, is subtracted.

Gateway, replicas and load generator share the machine, so where all of it is full the rate is the machine's: `busy`
says how many processors were. `lag` says how late the load generator itself was.

    python benchmarks/micro/gateway_rate.py --router router/bin/sglang-router --smg smg/bin/smg --json result.json
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import uvloop
from gateway_cost import (
    DEFAULT,
    OURS,
    PREBLE,
    ROUTER,
    SHEPHERD,
    SHORT,
    SMG,
    THEIRS,
    WHOLE,
    Arm,
    Running,
    add_common_options,
    head,
    started,
    started_replicas,
    tell,
    versions,
)
from gateway_parts.load import Connection, Question, connected
from gateway_parts.prompts import Prompts, question, train_tokenizer

from preble.cli.output import STDOUT, write_json

ARMS = [OURS, DEFAULT, Arm(PREBLE, "preble", workers=2), THEIRS, SHEPHERD]
LIMIT_MS = 50.0
LEAST_RPS, FIRST_RPS, MOST_RPS = 10.0, 200.0, 12_800.0
PRECISION = 1.07
"""The search ends when the rate is known up to this factor."""
DIRECT_RPS = 1_000.0
MOST_WAITING = 1_000
"""Requests without an answer with which a trial ends: more than 50 ms of any rate here."""


@dataclass(frozen=True)
class Trial:
    """One rate that was tried. Times in milliseconds, from when a request was due to its answer; `is_borne`: the p99
    is at most the limit more than direct. `busy`: processors, of `os.cpu_count()`."""

    rate: float
    p50_ms: float
    p99_ms: float
    lag_p99_ms: float
    busy: float
    is_borne: bool


@dataclass(frozen=True)
class Search:
    """What one gateway bears. `rate`: the largest that was borne; 0: none. `half`: at half of it."""

    arm: Arm
    rate: float
    half: Trial | None
    trials: list[Trial] = field(default_factory=list)

    @property
    def half_ms(self) -> tuple[float, ...]:
        """p50 and p99 at half of the rate; nothing where it bore none."""
        return (self.half.p50_ms, self.half.p99_ms) if self.half else ()


class Client:
    """Asks a server in an open loop, over as many connections as it takes."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._idle: list[Connection] = []
        self._taken_s: list[float] = []
        self._late_s: list[float] = []

    async def ask(self, questions: Sequence[Question], due_s: Sequence[float]) -> tuple[list[float], list[float]]:
        """Seconds from when each question was due, counted from now, to its answer, and by which it was sent late.
        Ends early where too many wait."""
        self._taken_s, self._late_s = [], []
        start, waiting = time.perf_counter(), set[asyncio.Task[None]]()
        for each, due in zip(questions, due_s, strict=True):
            left = start + due - time.perf_counter()
            if left > 0:
                await asyncio.sleep(left)
            if len(waiting) > MOST_WAITING:
                break
            task = asyncio.create_task(self._ask(each, start + due))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
        await asyncio.gather(*waiting)
        return self._taken_s, self._late_s

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _ask(self, each: Question, due_at: float) -> None:
        while self._idle and not self._idle[-1].is_open:
            self._idle.pop()
        connection = self._idle.pop() if self._idle else await connected(self._url)
        self._late_s.append(time.perf_counter() - due_at)
        await connection.ask(each)
        self._taken_s.append(time.perf_counter() - due_at)
        self._idle.append(connection)


class Searcher:
    """Searches for the rates of gateways with prompts that nobody has asked before."""

    def __init__(self, prompts: Prompts, seed: int, duration_s: float, direct: Client) -> None:
        self._prompts = prompts
        self._rng = random.Random(f"arrivals/{seed}")
        self._duration_s = duration_s
        self._direct = direct
        self.direct_ms = (0.0, 0.0)

    async def measure_direct(self) -> None:
        """What a replica itself takes: p50 and p99."""
        found = await self._tried(self._direct, DIRECT_RPS)
        self.direct_ms = (found.p50_ms, found.p99_ms)

    async def search(self, gateway: Running) -> Search:
        client = Client(gateway.url)

        async def tried(rate: float) -> Trial:
            tell(f"{gateway.arm.program} {gateway.arm.setting}: {rate:.0f}/s")
            return await self._tried(client, rate)

        trials = await searched(tried)
        borne = max((trial.rate for trial in trials if trial.is_borne), default=0.0)
        half = await tried(borne / 2) if borne else None
        client.close()
        return Search(gateway.arm, borne, half, trials)

    async def _tried(self, client: Client, rate: float) -> Trial:
        due_s, now = [], self._rng.expovariate(rate)
        while now < self._duration_s:
            due_s.append(now)
            now += self._rng.expovariate(rate)
        drawn = (self._prompts.draw(SHORT) for _ in due_s)
        questions = [question(prompt, form=WHOLE.form, events=WHOLE.events, natively=False) for prompt in drawn]
        before, started_at = busy_s(), time.perf_counter()
        taken_s, late_s = await client.ask(questions, due_s)
        busy = (busy_s() - before) / (time.perf_counter() - started_at)
        p50, p99 = np.round(1e3 * np.percentile(taken_s, (50, 99), method="higher"), 2).tolist()
        lag = float(np.round(1e3 * np.percentile(late_s, 99), 2))
        return Trial(round(rate, 1), p50, p99, lag, round(busy, 2), p99 - self.direct_ms[1] <= LIMIT_MS)


async def searched(tried: Callable[[float], Awaitable[Trial]]) -> list[Trial]:
    """Try rates until the largest that is borne is known to `PRECISION`, or that no rate in reach is the limit."""
    borne, too_much, rate, trials = 0.0, math.inf, FIRST_RPS, []
    while LEAST_RPS <= rate <= MOST_RPS and (not borne or too_much / borne > PRECISION):
        trials.append(await tried(rate))
        borne, too_much = (rate, too_much) if trials[-1].is_borne else (borne, rate)
        rate = 2 * borne if too_much == math.inf else math.sqrt((borne or too_much / 4) * too_much)
    return trials


def busy_s() -> float:
    """Seconds that the machine's processors have been busy, all together."""
    fields = [int(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


async def measure(args: argparse.Namespace, folder: Path) -> tuple[tuple[float, float], list[Search]]:
    prompts = Prompts(train_tokenizer(folder), args.seed)
    programs = {PREBLE: None, ROUTER: args.router, SMG: args.smg}
    arms = [arm for arm in ARMS if arm.program == PREBLE or programs[arm.program] is not None]
    async with AsyncExitStack() as stack:
        [url] = await stack.enter_async_context(started_replicas(1, folder / "direct.log", folder))
        gateways = [await stack.enter_async_context(started(arm, programs[arm.program], folder)) for arm in arms]
        searcher = Searcher(prompts, args.seed, args.duration, Client(url))
        await searcher.measure_direct()
        found = [await searcher.search(gateway) for _ in range(args.rounds) for gateway in gateways]
        return searcher.direct_ms, found


def median_of(searches: Sequence[Search], arm: Arm) -> Search:
    """The round of this gateway whose rate is the median; of two the lower one."""
    of_arm = sorted((search for search in searches if search.arm == arm), key=lambda search: search.rate)
    return of_arm[(len(of_arm) - 1) // 2]


def table(direct_ms: tuple[float, float], searches: Sequence[Search]) -> str:
    """Return the table of the rates that gateways bear, and of what they add at half of them."""
    lines = [f"{'8 KB, whole answers':28} {'requests/s':>10} {'of rounds':>14} {'added at half: p50':>18} {'p99':>10}"]
    for arm in dict.fromkeys(search.arm for search in searches):
        rates = [search.rate for search in searches if search.arm == arm]
        found, name = median_of(searches, arm), f"{arm.program} {arm.setting}"
        added = [f"{of_half - direct:.2f} ms" for of_half, direct in zip(found.half_ms, direct_ms, strict=False)]
        p50, p99 = added or ("-", "-")
        lines.append(f"{name:28} {found.rate:10.0f} {f'{min(rates):.0f} to {max(rates):.0f}':>14} {p50:>18} {p99:>10}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="searches for each gateway (default: 3)")
    parser.add_argument("--duration", type=float, default=2.0, help="seconds at each rate (default: 2)")
    add_common_options(parser)
    args = parser.parse_args()
    args.versions = versions(args.router, args.smg)
    made = head(args) | {"limit_ms": LIMIT_MS, "duration_s": args.duration, "processors": os.cpu_count()}
    with tempfile.TemporaryDirectory() as folder:
        direct_ms, searches = uvloop.run(measure(args, Path(folder)))
    write_json(args.json, made | {"direct_ms": direct_ms, "searches": [asdict(search) for search in searches]})
    tell("")
    if args.json != STDOUT:
        print(table(direct_ms, searches))


if __name__ == "__main__":
    main()
