"""What several processes cost: CPU a request of each, with 0 (one process does all), 1 and 2 workers.

Gateways, replicas that publish KV events but compute nothing (gateway_parts/upstream.py), and the load generator (this
one) are processes of their own. Every process of a gateway counts its own CPU time, and `/metrics` shows it. All
gateways are measured in turn, with the same requests; the cheapest round of each counts. From the CPU time follows what
cores of their own would carry: a gateway is full when its busiest process is. Wall-clock rates on a machine that also
runs the load say little.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import msgspec
import uvloop
from gateway_cost import REPLICAS, SETTLE_S, started_replicas
from gateway_parts.load import Question, ask_all, connected
from gateway_parts.prompts import Prompts, train_tokenizer
from gateway_parts.upstream import MODEL

from preble.cli.output import STDOUT, write_json
from preble.core.placing import scheduler as global_scheduler
from preble.lab.bench.gateway import started_gateway

WORKERS = (0, 1, 2)
TOKENS = 2000
CONNECTIONS = 32
CASES = {"8 KB, whole": 0, "8 KB, 50 events": 50}
_CPU = re.compile(r'^preble_process_cpu_seconds_total{process="([^"]+)"} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Running:
    """A gateway that runs."""

    workers: int
    url: str

    async def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each of its processes so far."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as answer:
            return {name: float(seconds) for name, seconds in _CPU.findall(await answer.text())}


@dataclass(frozen=True)
class Cost:
    """CPU microseconds a request, in the cheapest round. `front_us`: of all front ends together."""

    workers: int
    case: str
    total_us: float
    scheduler_us: float
    front_us: float

    @property
    def full_at(self) -> float:
        """Requests a second at which a process fills a core of its own."""
        return 1e6 / max(self.scheduler_us, self.front_us / max(self.workers, 1))


def cost_of(workers: int, case: str, spent: dict[str, float], requests: int) -> Cost:
    us = {name: seconds * 1e6 / requests for name, seconds in spent.items()}
    front = sum(value for name, value in us.items() if name.startswith("front-end"))
    return Cost(workers, case, sum(us.values()), sum(us.values()) - front, front)


def questions(prompts: Prompts, events: int, count: int) -> list[Question]:
    def one() -> Question:
        text = "".join(line.text for line in prompts.draw(TOKENS))
        fields = {"model": MODEL, "prompt": text, "max_tokens": events or 1, "stream": bool(events)}
        return Question("/v1/completions", msgspec.json.encode(fields), bool(events))

    return [one() for _ in range(count)]


async def measure(rounds: int, requests: int, folder: Path) -> list[Cost]:
    prompts = Prompts(train_tokenizer(folder), 0)
    best: dict[tuple[int, str], Cost] = {}
    async with AsyncExitStack() as stack:
        gateways = []
        for workers in WORKERS:
            replicas = started_replicas(REPLICAS, folder / f"{workers}.replicas.log", folder)
            urls = await stack.enter_async_context(replicas)
            serve = ["--workers", str(workers), "--tokenizer", str(folder)]
            gateway = await stack.enter_async_context(started_gateway(urls, serve, folder / f"{workers}.log"))
            gateways.append(Running(workers, gateway.url))
        for number in range(rounds + 1):  # the first warms up
            for case, events in CASES.items():
                asked = questions(prompts, events, requests)
                for running in gateways:
                    connections = [await connected(running.url) for _ in range(CONNECTIONS)]
                    before = await running.cpu_s()
                    await ask_all(connections, asked)
                    await asyncio.sleep(SETTLE_S)
                    after = await running.cpu_s()
                    for connection in connections:
                        connection.close()
                    spent = {name: seconds - before[name] for name, seconds in after.items()}
                    cost = cost_of(running.workers, case, spent, requests)
                    known = best.get((running.workers, case))
                    if number and (known is None or cost.total_us < known.total_us):
                        best[running.workers, case] = cost
    return sorted(best.values(), key=lambda cost: (cost.case, cost.workers))


def table(costs: Sequence[Cost]) -> str:
    head = (
        f"{'us of CPU a request':22} {'workers':>7} {'all':>6} {'scheduler':>9} {'front ends':>10} {'full at /s':>10}"
    )
    return "\n".join(
        [
            head,
            *(
                f"{cost.case:22} {cost.workers:7} {cost.total_us:6.0f} {cost.scheduler_us:9.0f} {cost.front_us:10.0f}"
                f" {cost.full_at:10.0f}"
                for cost in costs
            ),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the cheapest counts (default: 5)")
    parser.add_argument("--requests", type=int, default=320, help="requests of each kind in a round (default: 320)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers to FILE; - for stdout, instead of the table"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        costs = uvloop.run(measure(args.rounds, args.requests, Path(folder)))
    core = "compiled" if global_scheduler.__file__.endswith(".so") else "plain"
    write_json(args.json, {"core": core, "costs": [asdict(cost) for cost in costs]})
    if args.json != STDOUT:
        print(table(costs))


if __name__ == "__main__":
    main()
