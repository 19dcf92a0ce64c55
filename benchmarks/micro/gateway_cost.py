"""What the gateway itself costs: CPU seconds a request and a streamed event, and the time that it adds.

`preble serve` runs as its users start it, each request logged to a file, in front of four replicas that compute nothing
but publish KV events (gateway_parts/upstream.py). Each gateway has four of its own, so that all replicas have the same
history. Their caches are full before anything is measured: what is stored evicts as much. A case begins with requests
that do not count, until the beginnings of its prompts are known. Gateway, replicas and load generator (this one) are
processes of their own; the CPU time is the system's count for all threads of the gateway's process and of those that it
has started. Prompts are lines of the documentation, nine tenths of each shared with other prompts, in some cases half,
as text, which the gateway tokenizes, as token ids, and as chats with tools. All gateways are measured in turn, with the
same requests, and the cheapest round of each counts.

`--router` and `--smg` measure other routers beside it, sglang-router and the Shepherd model gateway. sglang-router
installs a command `smg` too, which is itself under another name; give the one of the package smg:

    python -m venv router && router/bin/pip install sglang-router
    python -m venv smg && smg/bin/pip install smg
    python benchmarks/micro/gateway_cost.py --router router/bin/sglang-router --smg smg/bin/smg --json result.json

gateway_rate.py searches for the rate that each bears, and gateway_cluster.py compares them in front of replicas that
compute.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import numpy as np
import uvloop
from gateway_parts import upstream
from gateway_parts.cache import STEP_S, STEP_TOKENS
from gateway_parts.load import Connection, Question, Times, ask_all, connected
from gateway_parts.prompts import PREFIXES, SHARED, Form, Line, Prompts, question, train_tokenizer

from preble.cli.output import STDOUT, write_json
from preble.core.placing import scheduler as global_scheduler
from preble.engines.starting.commands import Command
from preble.engines.starting.launch import ReplicaProcess
from preble.lab.bench.gateway import started_gateway

REPLICAS = 4
CONNECTIONS = 32
"""Requests at a time, where CPU seconds are counted."""
SETTLE_S = 0.1
"""After the last short answer, until the KV events of it have arrived."""
START_S = 30.0
PREBLE, ROUTER, SMG = "preble", "sglang-router", "smg"
SHORT, LONG, HUGE = 1_900, 24_000, 240_000
"""Tokens of about 8 KB, 100 KB and 1 MB of text."""
EVENTS = (16, 50, 200)
CROWDS = (1, 8, 512)
"""Further numbers of connections."""
HALF = 0.5
"""Shared, of prompts that are mostly new to the gateway."""
WARMING = 3 * PREFIXES
"""Requests before each measurement. The gateway keeps what it has seen twice."""
FILLING = 3_000
"""Such prompts of 8 KB fill the caches of all replicas."""
IDLE, STREAMS = 1_000, 256
"""Connections and streams whose memory is measured."""
ADDED_EVENTS = 2
ADDED_REQUESTS = 200
"""Of the answers whose time is taken: one at a time."""


@dataclass(frozen=True)
class Arm:
    """One gateway under one policy. `is_quiet`: logs only warnings, not a line for each request. `workers`: front-end
    processes; 0: one process does all. `has_events`: whether its replicas publish KV events."""

    program: str
    policy: str
    is_quiet: bool = False
    workers: int = 0
    has_events: bool = True

    @property
    def setting(self) -> str:
        """The policy, and what differs from the defaults."""
        more = f", {self.workers} worker{'s' * (self.workers > 1)}" if self.workers else ""
        return self.policy + ", quiet" * self.is_quiet + ", no events" * (not self.has_events) + more


OURS, DEFAULT = Arm(PREBLE, "preble"), Arm(PREBLE, "preble", workers=1)
"""In one process, and what `preble serve` does by default on two cores."""
ARMS = [
    OURS,
    DEFAULT,
    Arm(PREBLE, "preble", workers=2),
    Arm(PREBLE, "preble", is_quiet=True),
    Arm(PREBLE, "preble", has_events=False),
    Arm(PREBLE, "round_robin"),
]
THEIRS, SHEPHERD = Arm(ROUTER, "cache_aware"), Arm(SMG, "cache_aware")
ROUTER_ARMS = [THEIRS, Arm(ROUTER, "round_robin"), SHEPHERD]


@dataclass(frozen=True)
class Case:
    """One kind of request. `events`: of a streamed answer; 0 for a whole one. `connections`: requests at once.
    `shared`: the part of a prompt that others begin with, too."""

    tokens: int
    form: Form
    events: int
    connections: int = CONNECTIONS
    shared: float = SHARED

    def requests(self, usual: int) -> int:
        """In a round: fewer where each takes long, two a connection where there are many."""
        times_as_long = max(1.0, self.tokens / 8_000, self.events / 20, 32 * bool(self.events) / self.connections)
        return max(2 * self.connections, int(usual / times_as_long))

    def settle_s(self, count: int) -> float:
        """After the last of `count` answers, until the KV events have arrived, also if one replica has all prompts."""
        return SETTLE_S + count * self.tokens / STEP_TOKENS * STEP_S

    def __str__(self) -> str:
        answer = f"{self.events} events" if self.events else "whole"
        crowd = f" {self.connections:3} at once" if self.connections != CONNECTIONS else ""
        new = f" {self.shared:.0%} shared" if self.shared != SHARED else ""
        return f"{self.form:4} {self.tokens:6}  {answer:10}{crowd}{new}"


WHOLE = Case(SHORT, "text", 0)
CASES = [
    *(Case(tokens, "text", 0) for tokens in (SHORT, LONG)),
    Case(HUGE, "text", 0, 8),
    *(Case(tokens, "text", 0, shared=HALF) for tokens in (SHORT, LONG)),
    *(Case(SHORT, form, 0) for form in ("ids", "chat")),
    *(Case(SHORT, "text", events) for events in EVENTS),
    *(Case(SHORT, "text", events, crowd) for events in (0, EVENTS[1]) for crowd in CROWDS),
]


@dataclass(frozen=True)
class Cost:
    """CPU microseconds of a gateway for one request, in each round."""

    arm: Arm
    case: Case
    rounds_us: list[float]

    @property
    def request_us(self) -> float:
        return min(self.rounds_us)


@dataclass(frozen=True)
class Added:
    """Quantiles of the time through a gateway, less the same quantile of asking a replica directly, in microseconds."""

    arm: Arm
    case: Case
    first_byte_p50_us: float
    first_byte_p99_us: float
    end_p50_us: float
    end_p99_us: float


@dataclass(frozen=True)
class Memory:
    """KiB that a gateway takes for each stream that runs, with its connection, and for each idle connection more."""

    arm: Arm
    idle_kib: float
    stream_kib: float


@dataclass(frozen=True)
class Running:
    """A gateway that runs, and connections to it. `pids`: of its processes."""

    arm: Arm
    url: str
    pids: tuple[int, ...]
    connections: list[Connection]

    async def cpu_s(self, settle_s: float = SETTLE_S) -> float:
        """The CPU time of all its processes so far, when it has taken in what happened until now."""
        await asyncio.sleep(settle_s)
        return sum(time.clock_gettime(cpu_clock(pid)) for pid in self.pids)

    @property
    def kib(self) -> int:
        """Its resident memory."""
        status = [Path(f"/proc/{pid}/status").read_text() for pid in self.pids]
        return sum(int(text.partition("VmRSS:")[2].split()[0]) for text in status)

    def question_of(self, prompt: Sequence[Line], case: Case) -> Question:
        """The routers take token ids at `/generate` alone."""
        natively = self.arm.program != PREBLE and case.form == "ids"
        return question(prompt, form=case.form, events=case.events, natively=natively)

    async def ask_all(self, questions: Sequence[Question], at_once: int) -> None:
        """Raises: RuntimeError: an answer is not what the replica gave."""
        await ask_all(await self.opened(at_once), questions)

    async def opened(self, count: int) -> list[Connection]:
        """Connections that are open; a gateway closes those that have been idle."""
        self.connections[:] = [connection for connection in self.connections if connection.is_open]
        while len(self.connections) < count:
            self.connections.append(await connected(self.url))
        return self.connections[:count]

    def disconnect(self) -> None:
        while self.connections:
            self.connections.pop().close()


def tree_of(pid: int) -> tuple[int, ...]:
    """A process and all that it has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (pid, *(descendant for child in children for descendant in tree_of(int(child))))


def cpu_clock(pid: int) -> int:
    """The system's clock of the CPU time of a process. Raises: OSError."""
    clock = ctypes.c_int()
    if error := ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise OSError(error, os.strerror(error))
    return clock.value


@asynccontextmanager
async def started_router(router: Path, urls: Sequence[str], arm: Arm, log: Path) -> AsyncIterator[ReplicaProcess]:
    """sglang-router or SMG with its own defaults, every replica registered."""
    port, metrics_port = free_ports(2)
    argv = [str(router), "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", arm.policy]
    argv += ["--prometheus-port", str(metrics_port), "--worker-urls", *urls]
    process = ReplicaProcess(arm.program, Command(tuple(argv), dict(os.environ), port), log)
    try:
        await process.start()
        await process.wait_ready(START_S)
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
            while await registered(session, process.url) != len(urls):  # noqa: ASYNC110 (another process's state)
                await asyncio.sleep(0.1)
        yield process
    finally:
        await process.stop()


async def registered(session: aiohttp.ClientSession, url: str) -> int:
    """How many replicas the router has found healthy; it answers 503 until there is one."""
    async with session.get(f"{url}/readiness") as response:
        return int((await response.json(content_type=None)).get("healthy_workers", 0))


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@asynccontextmanager
async def started_replicas(count: int, log: Path, tokenizer: Path | None = None) -> AsyncIterator[list[str]]:
    """The URLs of replicas that compute nothing, in one process. `tokenizer`: they publish KV events."""
    argv = (sys.executable, upstream.__file__, str(count), *([] if tokenizer is None else [str(tokenizer)]))
    process = ReplicaProcess("upstream", Command(argv, dict(os.environ), None), log)
    try:
        await process.start()
        await process.wait_ready(START_S)
        yield re.findall(r"listening on (\S+)", log.read_text())  # noqa: ASYNC240 (a few lines)
    finally:
        await process.stop()


@asynccontextmanager
async def started(arm: Arm, program: Path | None, folder: Path, replicas: int = REPLICAS) -> AsyncIterator[Running]:
    """A gateway and its replicas. `program`: of a router. `folder`: has the tokenizer, and gets the logs."""
    log = folder / f"{arm.program} {arm.setting}.log"
    async with AsyncExitStack() as stack:
        tokenizer = folder if arm.has_events else None
        urls = await stack.enter_async_context(started_replicas(replicas, log.with_suffix(".up.log"), tokenizer))
        if program is None:
            level = "warning" if arm.is_quiet else "info"
            serve = ["--policy", arm.policy, "--tokenizer", str(folder), "--log-level", level]
            running = started_gateway(urls, [*serve, "--workers", str(arm.workers)], log)
        else:
            running = started_router(program, urls, arm, log)
        process = await stack.enter_async_context(running)
        assert process.pid is not None
        yield Running(arm, process.url, tree_of(process.pid), [])


class Benchmark:
    """All gateways, on the same replicas."""

    def __init__(self, gateways: list[Running], direct: Connection, prompts: Prompts, requests: int) -> None:
        self._gateways = gateways
        self._direct = direct
        self._prompts = prompts
        self._requests = requests

    async def fill(self) -> None:
        """Ask until the caches of all replicas are full."""
        case = Case(SHORT, "text", 0, shared=HALF)
        prompts = [self._prompts.draw(case.tokens, case.shared) for _ in range(FILLING)]
        for gateway in self._gateways:
            tell(f"filling the caches: {gateway.arm.program}")
            await gateway.ask_all([gateway.question_of(prompt, case) for prompt in prompts], case.connections)
            await asyncio.sleep(case.settle_s(FILLING // REPLICAS))

    async def costs(self, rounds: int) -> list[Cost]:
        """Every case, in every round once with each gateway."""
        found: dict[tuple[Arm, Case], list[float]] = {}
        for number in range(rounds):
            for case in CASES:
                tell(f"round {number + 1} of {rounds}: {case}")
                count = case.requests(self._requests)
                warming = [self._prompts.draw(case.tokens, case.shared) for _ in range(min(WARMING, count))]
                prompts = [self._prompts.draw(case.tokens, case.shared) for _ in range(min(count, self._requests))]
                for gateway in self._gateways:
                    gateway.disconnect()  # a gateway closes connections that were idle
                    await gateway.ask_all([gateway.question_of(prompt, case) for prompt in warming], case.connections)
                    questions = [gateway.question_of(prompts[i % len(prompts)], case) for i in range(count)]
                    before = await gateway.cpu_s(case.settle_s(len(warming)))
                    await gateway.ask_all(questions, case.connections)
                    spent_us = (await gateway.cpu_s(case.settle_s(count)) - before) * 1e6
                    found.setdefault((gateway.arm, case), []).append(round(spent_us / count, 1))
        return [Cost(arm, case, rounds_us) for (arm, case), rounds_us in found.items()]

    async def added(self) -> list[Added]:
        """One request at a time, to a replica and to each gateway in turn."""
        return [row for tokens in (SHORT, LONG) for row in await self._added_to(Case(tokens, "text", ADDED_EVENTS))]

    async def memory(self) -> list[Memory]:
        """What connections that have asked once, and streams, take of each gateway's memory."""
        found = []
        for gateway in self._gateways:
            tell(f"memory: {gateway.arm.program}")
            prompts = [self._prompts.draw(SHORT) for _ in range(16)]
            await gateway.ask_all([gateway.question_of(prompt, WHOLE) for prompt in prompts], 8)
            before = gateway.kib
            connections = [await connected(gateway.url) for _ in range(STREAMS)]
            stream = Case(SHORT, "text", EVENTS[-1])
            questions = [gateway.question_of(prompts[i % 16], stream) for i in range(STREAMS)]
            asking = asyncio.create_task(ask_all(connections, questions))
            await asyncio.sleep(EVENTS[-1] * upstream.EVENT_INTERVAL_S * 0.9)
            streaming = gateway.kib
            await asking
            kept = gateway.kib
            idle = [await connected(gateway.url) for _ in range(IDLE)]
            await ask_all(idle, [gateway.question_of(prompts[i % 16], WHOLE) for i in range(IDLE)])
            idle_kib, stream_kib = (gateway.kib - kept) / IDLE, (streaming - before) / STREAMS
            for connection in connections + idle:
                connection.close()
            found.append(Memory(gateway.arm, round(idle_kib, 1), round(stream_kib, 1)))
        return found

    async def _added_to(self, case: Case) -> list[Added]:
        tell(f"added time: {case}")
        direct: list[Times] = []
        through: list[list[Times]] = [[] for _ in self._gateways]
        for _ in range(ADDED_REQUESTS):
            prompt = self._prompts.draw(case.tokens)
            direct.append(await self._direct.ask(question(prompt, form="text", events=case.events, natively=False)))
            for gateway, times in zip(self._gateways, through, strict=True):
                [connection] = await gateway.opened(1)
                times.append(await connection.ask(gateway.question_of(prompt, case)))
        base = quantiles_us(direct)
        return [
            Added(gateway.arm, case, *np.round(quantiles_us(times) - base, 1).tolist())
            for gateway, times in zip(self._gateways, through, strict=True)
        ]


def quantiles_us(times: Sequence[Times]) -> np.ndarray:
    """p50 and p99 of the first byte, p50 and p99 of the end."""
    both = np.array([(each.first_byte_s, each.end_s) for each in times]) * 1e6
    return np.percentile(both, (50, 99), axis=0).T.ravel()


def tell(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:50}", end="", file=sys.stderr, flush=True)


def arms_of(rows: Sequence[Cost | Added]) -> list[Arm]:
    return list(dict.fromkeys(row.arm for row in rows))


def cost_table(costs: Sequence[Cost]) -> str:
    """CPU microseconds a request, and an event; then the requests a second with which one core is full."""
    arms = arms_of(costs)
    by = {(cost.arm, cost.case): cost.request_us for cost in costs}

    widths = [max(len(arm.program), len(arm.setting)) for arm in arms]

    def line(name: str, cells: Sequence[object]) -> str:
        return f"{name:38}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    return "\n".join(
        [
            line("", [arm.program for arm in arms]),
            line("us of CPU", [arm.setting for arm in arms]),
            *(line(f"{case}", [f"{by[arm, case]:.0f}" for arm in arms]) for case in CASES),
            line("each event more", [f"{event_us(by, arm):.0f}" for arm in arms]),
            "",
            line("requests/s filling a core", [arm.setting for arm in arms]),
            *(line(f"{case}", [f"{1e6 / by[arm, case]:.0f}" for arm in arms]) for case in CASES),
        ]
    )


def event_us(by: dict[tuple[Arm, Case], float], arm: Arm) -> float:
    """What one more event costs, of answers of 50."""
    return (by[arm, Case(SHORT, "text", EVENTS[1])] - by[arm, WHOLE]) / EVENTS[1]


def memory_table(rows: Sequence[Memory]) -> str:
    head = f"{'KiB of memory':30} {'an idle connection':>20} {'a stream':>10}"
    names = [f"{row.arm.program} {row.arm.setting}" for row in rows]
    lines = [f"{name:30} {row.idle_kib:20.1f} {row.stream_kib:10.1f}" for name, row in zip(names, rows, strict=True)]
    return "\n".join([head, *lines])


def added_table(rows: Sequence[Added]) -> str:
    """Return the table of the microseconds that each gateway adds to an idle replica's answer."""
    lines = [f"{'us added':12} {'through':27} {'first byte p50':>14} {'p99':>6} {'end p50':>8} {'p99':>6}"]
    for row in rows:
        first = f"{row.first_byte_p50_us:14.0f} {row.first_byte_p99_us:6.0f}"
        name = f"{row.arm.program} {row.arm.setting}"
        lines.append(f"text {row.case.tokens:6}  {name:27} {first} {row.end_p50_us:8.0f} {row.end_p99_us:6.0f}")
    return "\n".join(lines)


async def measure(args: argparse.Namespace, folder: Path) -> tuple[list[Cost], list[Added], list[Memory]]:
    prompts = Prompts(train_tokenizer(folder), args.seed)
    programs = {PREBLE: None, ROUTER: args.router, SMG: args.smg}
    arms = [*ARMS, *(arm for arm in ROUTER_ARMS if programs[arm.program] is not None)]
    async with AsyncExitStack() as stack:
        [url] = await stack.enter_async_context(started_replicas(1, folder / "direct.log", folder))
        gateways = [await stack.enter_async_context(started(arm, programs[arm.program], folder)) for arm in arms]
        benchmark = Benchmark(gateways, await connected(url), prompts, args.requests)
        await benchmark.fill()
        memory = await benchmark.memory()  # before crowds leave freed memory behind, which streams would use
        return await benchmark.costs(args.rounds), await benchmark.added(), memory


def versions(router: Path | None, smg: Path | None) -> dict[str, str | None]:
    """What each router says that it is. Raises: SystemExit: `smg` is sglang-router, which installs that name too."""
    found = {ROUTER: _version(router), SMG: _version(smg)}
    if found[SMG] is not None and not found[SMG].startswith("smg "):
        raise SystemExit(f"{smg} is {found[SMG]}, not SMG; install the package smg in an environment of its own")
    return found


def _version(router: Path | None) -> str | None:
    if router is None:
        return None
    return subprocess.run([router, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=320, help="requests of each kind in a round (default: 320)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds; the cheapest counts (default: 8)")
    add_common_options(parser)
    return parser.parse_args()


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Those of all benchmarks that compare gateways."""
    parser.add_argument("--router", type=Path, metavar="PATH", help="the command sglang-router; measures it too")
    parser.add_argument("--smg", type=Path, metavar="PATH", help="the command of the package smg; measures it too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers to FILE; - for stdout, instead of the tables"
    )


def head(args: argparse.Namespace) -> dict[str, object]:
    """What was measured, for the result."""
    return {
        "machine": f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}",
        "core": "compiled" if global_scheduler.__file__.endswith(".so") else "plain",
        "router": args.versions.get(ROUTER),
        "smg": args.versions.get(SMG),
        "load": os.getloadavg()[0],
        "seed": args.seed,
    }


def main() -> None:
    args = arguments()
    args.versions = versions(args.router, args.smg)
    made = head(args) | {"kv_events": True, "requests": args.requests}
    with tempfile.TemporaryDirectory() as folder:
        costs, added, memory = uvloop.run(measure(args, Path(folder)))
    rows = {"costs": costs, "added": added, "memory": memory}
    write_json(args.json, made | {name: [asdict(row) for row in found] for name, found in rows.items()})
    tell("")
    if args.json != STDOUT:
        print(cost_table(costs), added_table(added), memory_table(memory), sep="\n\n")


if __name__ == "__main__":
    main()
