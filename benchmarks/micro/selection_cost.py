"""What a placement by the selection service costs: its CPU seconds, in front of replicas that compute nothing.

One process of `preble select` gets the same prompts in three ways, in turns: it carries the request itself, as `preble
serve` does; it is asked by token ids; it is asked by the client's body. Asked means three calls: select and reserve,
prefill complete, end. The CPU time is the system's count for all threads of that process.

    python benchmarks/micro/selection_cost.py --json result.json
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import aiohttp
import msgspec
import uvloop
from gateway_cost import REPLICAS, cpu_clock, started_replicas, tell
from gateway_parts.load import Connection, Question, ask_all, connected
from gateway_parts.prompts import Line, Prompts, question, train_tokenizer
from picker_cost import CONNECTIONS, START_S, arguments

from preble.cli.output import STDOUT, write_json
from preble.core.placing import scheduler as global_scheduler
from preble.engines.starting.commands import Command
from preble.engines.starting.launch import ReplicaProcess

TOKENS = (100, 2000)
WAYS = ("carried", "by ids", "by body")


@dataclass(frozen=True)
class Cost:
    """CPU microseconds of the process for one request, in each round. `way`: one of `WAYS`."""

    way: str
    tokens: int
    rounds_us: list[float]


@asynccontextmanager
async def started_service(urls: Sequence[str], folder: Path) -> AsyncIterator[ReplicaProcess]:
    """`preble select` with every replica joined."""
    options = ["--port", "0", "--tokenizer", str(folder), "--log-level", "warning"]
    argv = [sys.executable, "-m", "preble", "select", *options]
    for url in urls:
        argv += ["--replica", url]
    process = ReplicaProcess("select", Command(tuple(argv), dict(os.environ), None), folder / "select.log")
    try:
        await process.start()
        await process.wait_ready(START_S)
        async with aiohttp.ClientSession() as session:
            joined = 0
            while joined != len(urls):
                async with session.get(f"{process.url}/ready") as answer:
                    joined = (await answer.json())["replicas"]
        yield process
    finally:
        await process.stop()


def questions(way: str, prompt: Sequence[Line], selection_id: str) -> list[Question]:
    """What is asked for one prompt, one after the other."""
    whole = question(prompt, form="text", events=2, natively=False)
    if way == "carried":
        return [whole]
    fields: dict[str, object] = {"path": whole.path, "body": msgspec.Raw(whole.body)}
    if way == "by ids":
        fields = {"token_ids": [token for line in prompt for token in line.ids]}
    select = Question("/select_and_reserve", msgspec.json.encode(fields | {"selection_id": selection_id}), False)
    path = f"/reservations/{selection_id}"
    computed = Question(f"{path}/prefill_complete", b"{}", False)
    return [select, computed, Question(f"{path}/end", b'{"output_tokens":2}', False)]


async def measure(rounds: int, num_requests: int, seed: int, folder: Path) -> list[Cost]:
    prompts, numbers = Prompts(train_tokenizer(folder), seed), count()
    found: dict[tuple[str, int], list[float]] = {}
    async with AsyncExitStack() as stack:
        urls = await stack.enter_async_context(started_replicas(REPLICAS, folder / "replicas.log"))
        service = await stack.enter_async_context(started_service(urls, folder))
        connections: list[Connection] = [await connected(service.url) for _ in range(CONNECTIONS)]
        assert service.pid is not None
        clock = cpu_clock(service.pid)
        for number in range(rounds):
            for tokens in TOKENS:
                tell(f"round {number + 1} of {rounds}: {tokens} tokens")
                for way in WAYS:
                    asked = [questions(way, prompts.draw(tokens), f"s{next(numbers)}") for _ in range(num_requests)]
                    before = time.clock_gettime(clock)
                    for step in zip(*asked, strict=True):
                        await ask_all(connections, step)
                    spent_us = (time.clock_gettime(clock) - before) * 1e6
                    found.setdefault((way, tokens), []).append(round(spent_us / num_requests, 1))
    return [Cost(way, tokens, rounds_us) for (way, tokens), rounds_us in found.items()]


def table(rows: list[Cost]) -> str:
    by = {(row.way, row.tokens): min(row.rounds_us) for row in rows}
    lines = [f"{'us of CPU a request':22}" + "".join(f" {way:>9}" for way in WAYS)]
    lines += [f"{tokens:8} tokens       " + "".join(f" {by[way, tokens]:9.0f}" for way in WAYS) for tokens in TOKENS]
    return "\n".join(lines)


def main() -> None:
    args = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        rows = uvloop.run(measure(args.rounds, args.requests, args.seed, Path(folder)))
    core = "compiled" if global_scheduler.__file__.endswith(".so") else "plain"
    head = {"core": core, "seed": args.seed, "requests": args.requests}
    write_json(args.json, head | {"costs": [asdict(row) for row in rows]})
    if args.json != STDOUT:
        print(table(rows))


if __name__ == "__main__":
    main()
