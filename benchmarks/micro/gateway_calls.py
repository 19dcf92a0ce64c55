"""How many functions the gateway calls for a request, and what they cost: gateway, replicas and client in one process.

Unlike CPU seconds, the number of calls hardly depends on what else the machine does. cProfile counts them: functions of
the package, of libraries, and built-in ones. It does not see calls inside compiled modules. The tokenizer's calls count
twice, since the replicas here use it too. The CPU time is the cheapest batch less that of asking a replica directly.

    python benchmarks/micro/gateway_calls.py --places 20 --json result.json
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import platform
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import uvloop
from gateway_cost import LONG, REPLICAS, SETTLE_S, SHORT, START_S, WHOLE, Case
from gateway_parts import upstream
from gateway_parts.cache import PromptTokenizer, PublishedCache
from gateway_parts.load import Connection, Question, ask_all, connected
from gateway_parts.prompts import Prompts, question, train_tokenizer

import preble
from preble.cli.output import STDOUT, write_json
from preble.config import GatewayConfig, ReplicaConfig
from preble.core.placing import scheduler as global_scheduler
from preble.gateway.server import serving
from preble.logs import configure_logging

CONNECTIONS = 8
CASES = {
    "text 8 KB, whole": WHOLE,
    "text 100 KB, whole": Case(LONG, "text", 0),
    "text 8 KB, 50 events": Case(SHORT, "text", 50),
    "ids 8 KB, whole": Case(SHORT, "ids", 0),
    "chat 8 KB, whole": Case(SHORT, "chat", 0),
}
PACKAGE, HERE = Path(preble.__file__).parent, Path(__file__).parent
SEAM = ("emulator/", "core/replica/")
"""What replicas here use of the package, and the gateway does not."""
LIBRARIES, BENCHMARK = "libraries", "benchmark"


@dataclass(frozen=True)
class Calls:
    """Of one request. `cpu_us`: of the gateway alone. `places`: calls by module of the package, or "libraries"."""

    case: str
    calls: float
    cpu_us: float
    places: dict[str, float]


@asynccontextmanager
async def replicas_here(folder: Path) -> AsyncIterator[list[str]]:
    """The URLs of replicas in this process, which publish KV events."""
    loop, tokenizer = asyncio.get_running_loop(), PromptTokenizer(folder)
    caches = [PublishedCache(tokenizer) for _ in range(REPLICAS)]
    listening = [loop.create_server(partial(upstream.Connection, cache), "127.0.0.1", 0) for cache in caches]
    servers = await asyncio.gather(*listening)
    publishing = asyncio.gather(*(cache.publish() for cache in caches), return_exceptions=True)
    try:
        yield ["http://{}:{}".format(*server.sockets[0].getsockname()) for server in servers]
    finally:
        publishing.cancel()
        await asyncio.wait([publishing])
        for server in servers:
            server.close()


async def measure(folder: Path, num_requests: int, batches: int) -> list[Calls]:
    prompts = Prompts(train_tokenizer(folder), 0)
    async with replicas_here(folder) as urls:
        config = GatewayConfig(replicas=tuple(map(ReplicaConfig, urls)), port=0, tokenizer=str(folder))
        async with serving(config) as gateway:
            async with asyncio.timeout(START_S):
                while len(gateway.serving.replicas) < REPLICAS:  # noqa: ASYNC110 (nothing to await)
                    await asyncio.sleep(0.05)
            addresses = (gateway.url, urls[0])
            return [await of_case(name, prompts, num_requests, batches, *addresses) for name in CASES]


async def of_case(name: str, prompts: Prompts, count: int, batches: int, url: str, direct_url: str) -> Calls:
    case = CASES[name]
    through = [await connected(url) for _ in range(CONNECTIONS)]
    direct = [await connected(direct_url) for _ in range(CONNECTIONS)]

    def draw() -> list[Question]:
        drawn = (prompts.draw(case.tokens) for _ in range(count))
        return [question(prompt, form=case.form, events=case.events, natively=False) for prompt in drawn]

    await ask_all(through, draw())
    through_us = min([await cpu_us(through, draw()) for _ in range(batches)])
    places = await counted(through, draw())
    direct_us = min([await cpu_us(direct, draw()) for _ in range(batches)])
    for connection in through + direct:
        connection.close()
    return Calls(name, round(sum(places.values()), 1), round(through_us - direct_us, 1), places)


async def cpu_us(connections: list[Connection], questions: list[Question]) -> float:
    """CPU microseconds of this process for each request."""
    before = time.process_time()
    await ask_all(connections, questions)
    await asyncio.sleep(SETTLE_S)
    return (time.process_time() - before) / len(questions) * 1e6


async def counted(connections: list[Connection], questions: list[Question]) -> dict[str, float]:
    """Calls for each request by the place whose functions they are; the most first. Built-in ones count for the place
    that calls them."""
    profile = cProfile.Profile()
    profile.enable()
    await ask_all(connections, questions)
    await asyncio.sleep(SETTLE_S)
    profile.disable()
    profile.create_stats()
    calls: Counter[str] = Counter()
    for (file, _, _), (_, times, _, _, callers) in profile.stats.items():  # type: ignore[attr-defined]
        if file == "~":
            for (of_caller, _, _), (_, by_caller, _, _) in callers.items():
                calls[place_of(of_caller)] += by_caller
        else:
            calls[place_of(file)] += times
    del calls[BENCHMARK]
    return {place: round(times / len(questions), 1) for place, times in calls.most_common()}


def place_of(file: str) -> str:
    """The module of the package, or what else it is.

    >>> place_of(f"{PACKAGE}/gateway/server.py"), place_of("/usr/lib/python3.11/asyncio/tasks.py")
    ('gateway/server.py', 'libraries')
    """
    path = Path(file)
    if path.is_relative_to(PACKAGE):
        place = path.relative_to(PACKAGE).as_posix()
        return BENCHMARK if place.startswith(SEAM) else place
    return BENCHMARK if path.is_relative_to(HERE) else LIBRARIES


def table(found: Sequence[Calls], places: int) -> str:
    lines = [f"{'of one request':24} {'calls':>6} {'us of CPU':>10}"]
    for row in found:
        lines.append(f"{row.case:24} {row.calls:6.0f} {row.cpu_us:10.0f}")
        lines += [f"    {times:6.1f} {place}" for place, times in list(row.places.items())[:places]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=40, help="requests in a batch (default: 40)")
    parser.add_argument("--batches", type=int, default=6, help="batches; the cheapest counts (default: 6)")
    parser.add_argument("--places", type=int, default=0, metavar="N", help="also show the N places with most calls")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers to FILE; - for stdout, instead of the table"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as log, redirect_stderr(log):
        configure_logging("info", "json")
        found = uvloop.run(measure(Path(folder), args.requests, args.batches))
    core = "compiled" if global_scheduler.__file__.endswith(".so") else "plain"
    made = {"python": platform.python_version(), "core": core, "requests": args.requests}
    write_json(args.json, made | {"calls": [asdict(row) for row in found]})
    if args.json != STDOUT:
        print(table(found, args.places))


if __name__ == "__main__":
    main()
