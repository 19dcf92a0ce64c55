"""What the endpoint picker costs beside the gateway: CPU seconds a request, in front of replicas that compute nothing.

Two arms on the same four replicas (gateway_parts/upstream.py), in turns, with the same requests: `preble serve`, and
Envoy with `preble epp`, both bodies full duplex. The CPU time is the system's count for all threads of the gateway's
process, of the picker's, and of Envoy's. Prompts are lines of the documentation; each shares half with others.

    python3 dev/setup.py envoy
    python benchmarks/micro/picker_cost.py --json result.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import uvloop
from gateway_cost import REPLICAS, Case, cpu_clock, free_ports, started_replicas, tell
from gateway_parts.load import Connection, ask_all, connected
from gateway_parts.prompts import Prompts, question, train_tokenizer

from preble.cli.output import STDOUT, write_json
from preble.core.placing import scheduler as global_scheduler
from preble.engines.starting.commands import Command
from preble.engines.starting.launch import ReplicaProcess
from preble.lab.bench.gateway import started_gateway

ROOT = Path(__file__).parents[2]
ENVOY = ROOT / ".servers" / "envoy" / "bin" / "envoy"
CONFIG = ROOT / "deploy" / "helm" / "preble" / "files" / "envoy.yaml"
CONNECTIONS = 8
START_S = 60.0
CASES = [Case(tokens, "text", events) for events in (0, 2, 64) for tokens in (100, 2000)]
"""2,000 tokens are about 8 KB of text."""


@dataclass(frozen=True)
class Cost:
    """CPU microseconds for one request, in each round. `process`: "gateway", "picker" or "envoy"."""

    process: str
    case: Case
    rounds_us: list[float]


@dataclass(frozen=True)
class Arm:
    """One way to the replicas: its processes' clocks by name, and connections to it."""

    clocks: dict[str, int]
    connections: list[Connection]


@asynccontextmanager
async def started_picker(
    urls: list[str], args: list[str], folder: Path, preble: tuple[str, ...] = (sys.executable, "-m", "preble")
) -> AsyncIterator[tuple[ReplicaProcess, int]]:
    """`preble epp` with every replica joined, and its port for gateways."""
    [port] = free_ports(1)
    argv = [*preble, "epp", "--port", "0", "--grpc-port", str(port), *args]
    for url in urls:
        argv += ["--replica", url]
    process = ReplicaProcess("picker", Command(tuple(argv), dict(os.environ), None), folder / "picker.log")
    try:
        await process.start()
        await process.wait_ready(START_S)
        async with aiohttp.ClientSession() as session:
            joined = 0
            while joined != len(urls):
                async with session.get(f"{process.url}/ready") as answer:
                    joined = (await answer.json())["replicas"]
        yield process, port
    finally:
        await process.stop()


@asynccontextmanager
async def started_envoy(picker_port: int, urls: list[str], folder: Path) -> AsyncIterator[tuple[ReplicaProcess, str]]:
    """Envoy with the chart's configuration, and its URL."""
    port, admin_port = free_ports(2)
    hosts = [url.removeprefix("http://").split(":") for url in urls]
    endpoint = "{{ endpoint: {{ address: {{ socket_address: {{ address: {}, port_value: {} }} }} }} }}"
    values = {"ADMIN_PORT": admin_port, "ADDRESS": "127.0.0.1", "PORT": port, "PICKER": "127.0.0.1"}
    values |= {"PICKER_PORT": picker_port, "REPLICAS": ", ".join(endpoint.format(*host) for host in hosts)}
    text = CONFIG.read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    config = folder / "envoy.yaml"
    config.write_text(text)
    argv = (str(ENVOY), "-c", str(config), "--concurrency", "1", "--log-level", "warn", "--disable-hot-restart")
    process = ReplicaProcess("envoy", Command(argv, dict(os.environ), admin_port, "/ready"), folder / "envoy.log")
    try:
        await process.start()
        await process.wait_ready(START_S)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        await process.stop()


async def until_served(url: str) -> None:
    """Envoy asks the picker once its health check has passed."""
    async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/v1/models") as answer:
                if answer.status == 200:
                    return


async def measure(args: argparse.Namespace, folder: Path) -> list[Cost]:
    prompts = Prompts(train_tokenizer(folder), args.seed)
    common = ["--tokenizer", str(folder), "--log-level", "warning"]
    async with AsyncExitStack() as stack:
        urls = await stack.enter_async_context(started_replicas(REPLICAS, folder / "replicas.log"))
        gateway = await stack.enter_async_context(
            started_gateway(urls, [*common, "--workers", "0"], folder / "gateway.log")
        )
        picker, port = await stack.enter_async_context(started_picker(urls, common, folder))
        envoy, url = await stack.enter_async_context(started_envoy(port, urls, folder))
        await until_served(url)
        arms = [
            Arm({"gateway": clock_of(gateway)}, [await connected(gateway.url) for _ in range(CONNECTIONS)]),
            Arm(
                {"picker": clock_of(picker), "envoy": clock_of(envoy)},
                [await connected(url) for _ in range(CONNECTIONS)],
            ),
        ]
        return await costs(arms, prompts, args)


def clock_of(process: ReplicaProcess) -> int:
    assert process.pid is not None
    return cpu_clock(process.pid)


async def costs(arms: list[Arm], prompts: Prompts, args: argparse.Namespace) -> list[Cost]:
    """Every case, in every round once with each arm."""
    found: dict[tuple[str, Case], list[float]] = {}
    for number in range(args.rounds):
        for case in CASES:
            tell(f"round {number + 1} of {args.rounds}: {case}")
            drawn = [prompts.draw(case.tokens) for _ in range(args.requests)]
            questions = [question(prompt, form="text", events=case.events, natively=False) for prompt in drawn]
            for arm in arms:
                before = {name: time.clock_gettime(clock) for name, clock in arm.clocks.items()}
                await ask_all(arm.connections, questions)
                for name, clock in arm.clocks.items():
                    spent_us = (time.clock_gettime(clock) - before[name]) * 1e6
                    found.setdefault((name, case), []).append(round(spent_us / len(questions), 1))
    return [Cost(name, case, rounds_us) for (name, case), rounds_us in found.items()]


def table(rows: list[Cost]) -> str:
    by = {(row.process, row.case): min(row.rounds_us) for row in rows}
    names = list(dict.fromkeys(row.process for row in rows))
    lines = [f"{'us of CPU a request':26}" + "".join(f" {name:>9}" for name in names)]
    lines += [f"{case!s:26}" + "".join(f" {by[name, case]:9.0f}" for name in names) for case in CASES]
    few, many = Case(2000, "text", 2), Case(2000, "text", 64)
    each = ((by[name, many] - by[name, few]) / (many.events - few.events) for name in names)
    return "\n".join([*lines, f"{'each event more':26}" + "".join(f" {cost:9.0f}" for cost in each)])


def arguments(text: str | None) -> argparse.Namespace:
    """The options of a command that `text` explains."""
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=48, help="requests of each kind in a round (default: 48)")
    parser.add_argument("--rounds", type=int, default=6, help="rounds; the cheapest counts (default: 6)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers to FILE; - for stdout, instead of the table"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        rows = uvloop.run(measure(args, Path(folder)))
    head = {
        "machine": f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}",
        "core": "compiled" if global_scheduler.__file__.endswith(".so") else "plain",
        "seed": args.seed,
        "requests": args.requests,
    }
    write_json(args.json, head | {"costs": [asdict(row) for row in rows]})
    tell("")
    if args.json != STDOUT:
        print(table(rows))


if __name__ == "__main__":
    main()
