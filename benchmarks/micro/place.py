"""How fast the global scheduler places requests, and how that grows.

Everything is on (of E2: rebalancing, replication and prefill/decode balance). The time includes all that a request
causes: its placement, first token and end, the evictions that make room for it, and timers. It does not include making
the tokens. The traces have the sizes and sharing of Table 1 of the paper and never end: some prefixes are in use at a
time, each for as many requests as in the table; then a new one replaces it. The garbage collector is set as in a
gateway.

    python benchmarks/micro/place.py                          # both traces, 4, 64 and 400 replicas, 5,000 requests
    python benchmarks/micro/place.py --requests 200000 --replicas 4 --trace tool_use --json result.json
    python benchmarks/micro/place.py --policy preble
    python benchmarks/micro/place.py --cold --requests 500 --replicas 4     # caches emptied before each call
    python benchmarks/micro/place.py --instructions --replicas 4 --trace tool_use    # counted by valgrind

In a gateway much else runs between two placements, so what a placement touches is no longer in the processor's caches.
`--cold` walks through 16 MB before each call of the scheduler, and says how many of the interpreter's memory blocks a
placement leaves behind. `--instructions` runs this file under callgrind and counts what the scheduler does from a
request's placement to its end, without KV events: compiled code has symbols for these calls, so it needs the compiled
core.
"""

from __future__ import annotations

import argparse
import heapq
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from preble.cli.output import STDOUT, write_json
from preble.core.costs.model import CostModel
from preble.core.placing import scheduler as global_scheduler
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import make_policy, policy_names
from preble.core.types import (
    TOKEN_BYTES,
    BlocksEvicted,
    BlocksStored,
    PackedTokens,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
)
from preble.profiles import load_profile
from preble.web.server.memory import freeze_gc

BLOCK = 16
DEFAULT_POLICY = "e2"
COLD_BYTES = 16 * 2**20
IS_COMPILED = global_scheduler.__file__.endswith(".so")
HASHES = {"PYTHONHASHSEED": "0"}
"""Else two runs differ by what their dictionaries cost."""
COUNTED = 1000
"""Requests of a run whose instructions are counted."""
CALLS = ("place", "on_first_token", "on_finish", "next_timer", "on_timer")
"""Calls of the scheduler that are counted."""
LATENCY_S = 2.0
"""Between a request's placement and its end; its first token comes after a quarter of that."""


@dataclass(frozen=True)
class Shape:
    """One of the paper's workloads. Lengths in tokens, as (mean, standard deviation); `rps` a replica."""

    system: int
    prefix: tuple[float, float]
    tail: tuple[float, float]
    uses: tuple[float, float]
    output: int
    active: int
    rps: float


SHAPES = {
    "tool_use": Shape(190, (1410, 740), (235, 200), (39, 64), 43, 300, 4.0),
    "video": Shape(16, (9790, 5976), (55, 8), (8.6, 2.0), 4, 100, 1.0),
}


def lognormal(rng: np.random.Generator, mean: float, deviation: float) -> int:
    variance = np.log(1 + (deviation / mean) ** 2)
    return max(1, int(rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance))))


def prompts(shape: Shape, seed: int) -> Iterator[PackedTokens]:
    """Prompts without end. `active` prefixes per trace are in use at any time."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> bytes:
        return rng.integers(0, 32_000, count, np.uint32).tobytes()

    def prefix() -> list[object]:
        length = min(max(lognormal(rng, *shape.prefix), 100), 3 * shape.prefix[0])
        return [system + tokens(int(length)), lognormal(rng, *shape.uses)]

    system = tokens(shape.system)
    active = [prefix() for _ in range(shape.active)]
    while True:
        chosen = int(rng.integers(len(active)))
        head, left = active[chosen]
        active[chosen] = [head, left - 1] if left > 1 else prefix()
        yield PackedTokens(head + tokens(lognormal(rng, *shape.tail)))


class EngineCache:
    """The seam of the benchmark: a replica's block cache, LRU, which says what it stores and evicts. Not timed."""

    def __init__(self, replica_id: ReplicaId, capacity_tokens: int, block: int) -> None:
        self.replica_id = replica_id
        self.block = block
        self.capacity = capacity_tokens // block
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def run(self, prompt: PackedTokens) -> tuple[BlocksStored | None, BlocksEvicted | None]:
        size = self.block * TOKEN_BYTES
        hashes: list[int] = []
        parent = 0
        for start in range(0, len(prompt) // size * size, size):
            parent = hash((parent, prompt[start : start + size]))
            hashes.append(parent)
        known = next((i for i, name in enumerate(hashes) if name not in self.blocks), len(hashes))
        for name in reversed(hashes):
            self.blocks[name] = None
            self.blocks.move_to_end(name)
        gone = [self.blocks.popitem(last=False)[0] for _ in range(max(0, len(self.blocks) - self.capacity))]
        fresh = tuple(hashes[known:])
        tokens = PackedTokens(prompt[known * size : len(hashes) * size])
        stored = BlocksStored(self.replica_id, fresh, hashes[known - 1] if known else None, tokens, self.block)
        return (stored if fresh else None), (BlocksEvicted(self.replica_id, tuple(gone)) if gone else None)


@dataclass
class Result:
    """`rate`: requests a second of the scheduler's own CPU time. `growth`: that time in the last fifth of the requests,
    as a multiple of the first fifth's. `index_bytes_per_packed_byte`: memory of the index by tokens it holds."""

    trace: str
    replicas: int
    requests: int
    evictions: str
    rate: float
    place_p50_us: float
    place_p99_us: float
    place_max_us: float
    timer_max_us: float
    growth: float
    hit_rate: float
    exploit_us: float
    explore_us: float
    index_mib: float
    index_budget_mib: float
    index_bytes_per_packed_byte: float
    reasons: dict[str, int]
    place_kept_blocks: float = 0.0


class Clock:
    """CPU seconds spent inside the scheduler. `cold`: walk through memory first, so that its caches hold other things.
    `kept_blocks`: the interpreter's memory blocks that the last call left behind."""

    def __init__(self, *, cold: bool = False) -> None:
        self.total = 0.0
        self.kept_blocks = 0
        self._walk = np.zeros(COLD_BYTES // 8) if cold else None

    def __enter__(self) -> Clock:
        if self._walk is not None:
            self._walk += 1.0
            self._blocks = sys.getallocatedblocks()
        self._start = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.last = time.process_time() - self._start
        if self._walk is not None:
            self.kept_blocks = sys.getallocatedblocks() - self._blocks
        self.total += self.last


class Run:
    """One trace through one scheduler."""

    def __init__(
        self,
        trace: str,
        replicas: int,
        requests: int,
        evictions: str,
        budget_mib: float,
        seed: int,
        *,
        policy: str = DEFAULT_POLICY,
        block: int = BLOCK,
        cold: bool = False,
    ) -> None:
        self.shape, self.trace, self.num_requests, self.evictions = SHAPES[trace], trace, requests, evictions
        self.budget_mib = budget_mib
        profile = load_profile("a6000-mistral-7b")
        self.scheduler = GlobalScheduler(
            make_policy(policy), CostModel(profile), seed=seed, index_budget_bytes=int(budget_mib * 2**20)
        )
        names = [ReplicaId(f"replica-{i}") for i in range(replicas)]
        reports = evictions == "events"
        for name in names:
            self.scheduler.add_replica(ReplicaSpec(name, profile.kv_capacity_tokens, None, block, reports), 0.0)
        self.engines = {name: EngineCache(name, profile.kv_capacity_tokens, block) for name in names} if reports else {}
        self.clock = Clock(cold=cold)
        self.kept_blocks = 0
        self.due: list[tuple[float, int, RequestId]] = []
        self.next_timer: float | None = None
        self.timers: list[float] = []
        self.prompts = prompts(self.shape, seed)
        self.rps = self.shape.rps * replicas

    def measure(self) -> Result:
        placed: list[tuple[float, str]] = []
        costs: list[float] = []
        matched = tokens = 0
        reasons: dict[str, int] = {}
        for i in range(self.num_requests):
            now = i / self.rps
            request = Request(RequestId(f"q{i}"), next(self.prompts))
            before = self.clock.total
            self.catch_up(now)
            with self.clock:
                placement = self.scheduler.place(request, now)
            placed.append((self.clock.last, str(placement.reason)))
            self.kept_blocks += self.clock.kept_blocks
            matched, tokens = matched + placement.matched_tokens, tokens + placement.num_prompt_tokens
            reasons[str(placement.reason)] = reasons.get(str(placement.reason), 0) + 1
            heapq.heappush(self.due, (now + LATENCY_S / 4, 0, request.request_id))
            heapq.heappush(self.due, (now + LATENCY_S, 1, request.request_id))
            self.report(placement.replica_id, request.prompt, now)
            costs.append(self.clock.total - before)
            if sys.stderr.isatty() and i % 2000 == 0:
                print(f"\r{self.trace} {i:,}/{self.num_requests:,}", end="", file=sys.stderr)
        return self.result(placed, costs, matched / tokens, reasons)

    def catch_up(self, now: float) -> None:
        while self.due and self.due[0][0] <= now:
            at, kind, request_id = heapq.heappop(self.due)
            with self.clock:
                if kind == 0:
                    self.scheduler.on_first_token(request_id, at)
                else:
                    self.scheduler.on_finish(request_id, self.shape.output, at)
        with self.clock:
            due = self.scheduler.next_timer()
        if due is not None and due <= now:
            with self.clock:
                self.scheduler.on_timer(now)
            self.timers.append(self.clock.last)

    def report(self, replica_id: ReplicaId, prompt: PackedTokens, now: float) -> None:
        if not self.engines:
            return
        stored, evicted = self.engines[replica_id].run(prompt)
        with self.clock:
            if stored is not None:
                self.scheduler.on_stored(stored, now)
            if evicted is not None:
                self.scheduler.on_evicted(evicted, now)

    def result(
        self, placed: list[tuple[float, str]], costs: list[float], hit_rate: float, reasons: dict[str, int]
    ) -> Result:
        times = np.array([seconds for seconds, _ in placed]) * 1e6
        of = {reason: times[[r == reason for _, r in placed]] for reason in reasons}
        fifth = len(costs) // 5
        packed = self.scheduler.snapshot().num_index_tokens * TOKEN_BYTES
        return Result(
            trace=self.trace,
            replicas=len(self.scheduler.snapshot().replicas),
            requests=len(costs),
            evictions=self.evictions,
            rate=len(costs) / self.clock.total,
            place_p50_us=float(np.percentile(times, 50)),
            place_p99_us=float(np.percentile(times, 99)),
            place_max_us=float(times.max()),
            place_kept_blocks=self.kept_blocks / len(costs),
            timer_max_us=max(self.timers, default=0.0) * 1e6,
            growth=float(np.median(costs[-fifth:]) / np.median(costs[:fifth])),
            hit_rate=hit_rate,
            exploit_us=float(np.median(of["exploit"])) if "exploit" in of else 0.0,
            explore_us=float(np.median(of["explore"])) if "explore" in of else 0.0,
            index_mib=self.scheduler.snapshot().num_index_bytes / 2**20,
            index_budget_mib=self.budget_mib,
            index_bytes_per_packed_byte=self.scheduler.snapshot().num_index_bytes / packed if packed else 0.0,
            reasons=reasons,
        )


HEADER = (
    f"{'trace':9} {'replicas':>8} {'requests':>8} {'per s':>7} {'p50 us':>7} {'p99 us':>7} {'timer us':>8} "
    f"{'growth':>6} {'hits':>5} {'MiB':>6} {'x packed':>8}"
)


def row(r: Result) -> str:
    """One line of the table."""
    return (
        f"{r.trace:9} {r.replicas:8} {r.requests:8} {r.rate:7.0f} {r.place_p50_us:7.0f} {r.place_p99_us:7.0f} "
        f"{r.timer_max_us:8.0f} {r.growth:6.2f} {r.hit_rate:5.2f} {r.index_mib:6.1f} "
        f"{r.index_bytes_per_packed_byte:8.2f}"
    )


def traced_bytes_per_packed_byte(trace: str, seed: int, evictions: str, block: int) -> tuple[float, float]:
    """The index's memory as the interpreter counts it and as the scheduler does, by packed token bytes; 4 replicas."""
    run = Run(trace, 4, 3000 if block == BLOCK else 600, evictions, 4096.0, seed, block=block)
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    run.measure()
    run.due.clear()
    del run.prompts
    run.engines.clear()
    core = [tracemalloc.Filter(True, "*/core/prefixes/*.py")]
    grown = tracemalloc.take_snapshot().filter_traces(core).compare_to(before.filter_traces(core), "filename")
    tracemalloc.stop()
    packed = run.scheduler.snapshot().num_index_tokens * TOKEN_BYTES
    return sum(entry.size_diff for entry in grown) / packed, run.scheduler.snapshot().num_index_bytes / packed


def instructions_per_request(options: list[str]) -> float:
    """Instructions of the compiled scheduler for a request. Needs valgrind."""
    if (valgrind := shutil.which("valgrind")) is None:
        raise SystemExit("--instructions needs valgrind; install it from your system's packages")
    tool = [valgrind, "--tool=callgrind", "--callgrind-out-file=/dev/null", "--collect-atstart=no"]
    tool += [f"--toggle-collect=CPyPy_placing___scheduler___GlobalScheduler___{call}" for call in CALLS]
    command = [*tool, sys.executable, __file__, *options, "--requests", str(COUNTED)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **HASHES})
    return int(re.findall(r"Collected : (\d+)", finished.stderr)[-1]) / COUNTED


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--policy", choices=policy_names(), default=DEFAULT_POLICY, metavar="NAME", help="the policy (default: e2)"
    )
    parser.add_argument("--trace", choices=SHAPES, action="append", help="the trace; repeatable (default: both)")
    parser.add_argument(
        "--replicas", type=int, action="append", help="the number of replicas; repeatable (default: 4, 64 and 400)"
    )
    parser.add_argument("--requests", type=int, action="append", help="requests of a run; repeatable (default: 5000)")
    parser.add_argument("--evictions", choices=("belief", "events"), default="belief")
    parser.add_argument("--budget-mib", type=float, default=256.0, help="memory budget of the index (default: 256)")
    parser.add_argument("--block-size", type=int, default=BLOCK, metavar="TOKENS", help="of the replicas (default: 16)")
    parser.add_argument("--cold", action="store_true", help="walk through 16 MB before each call of the scheduler")
    parser.add_argument("--instructions", action="store_true", help="count a request's instructions instead (valgrind)")
    parser.add_argument("--memory", action="store_true", help="measure the index's memory instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers to FILE; - for stdout, instead of the table"
    )
    arguments = parser.parse_args()
    freeze_gc()
    if arguments.instructions:
        options = [option for option in sys.argv[1:] if option != "--instructions"]
        if not IS_COMPILED:
            parser.error("--instructions counts calls of the compiled core: run it with .native/bin/python")
        print(f"{instructions_per_request(options):,.0f} instructions a request")
        return
    traces = arguments.trace or list(SHAPES)
    if arguments.memory:
        if IS_COMPILED:
            parser.error("--memory counts what Python's allocator was asked for: run it on the plain core (.venv)")
        for trace in traces:
            measured, counted = traced_bytes_per_packed_byte(
                trace, arguments.seed, arguments.evictions, arguments.block_size
            )
            print(f"{trace}: {measured:.2f} bytes in memory a packed token byte, {counted:.2f} as counted")
        return
    results = [
        Run(
            trace,
            replicas,
            requests,
            arguments.evictions,
            arguments.budget_mib,
            arguments.seed,
            policy=arguments.policy,
            block=arguments.block_size,
            cold=arguments.cold,
        ).measure()
        for trace in traces
        for requests in arguments.requests or [5000]
        for replicas in arguments.replicas or [4, 64, 400]
    ]
    machine = f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}"
    core = "compiled" if IS_COMPILED else "plain"
    head = {"machine": machine, "core": core, "policy": arguments.policy, "seed": arguments.seed}
    if arguments.cold:
        head["caches"] = "cold"
    write_json(arguments.json, head | {"results": results})
    if arguments.json != STDOUT:
        print("\r" + HEADER, *map(row, results), sep="\n")
        if arguments.cold:
            print(f"each placement leaves {results[0].place_kept_blocks:.1f} memory blocks behind")


if __name__ == "__main__":
    main()
