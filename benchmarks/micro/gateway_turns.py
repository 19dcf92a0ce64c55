"""Whether the gateway of today costs more CPU than that of an earlier commit, measured in turns of pairs.

    python benchmarks/micro/gateway_turns.py ea2ddf1f --json benchmarks/results/gateway_turns.json

Both gateways run all the time, each before replicas of its own, and only one is asked at a time. A pair asks both
for the same, in alternating order; its ratio is today's CPU time by the earlier one's. What else the machine does
slows both of a pair, so on a busy machine ratios say more than the cheapest round does. The interval holds the
median ratio in 95 of 100 draws of as many pairs. The requests ask for nothing but an answer: no target,
class, session or hint.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import uvloop
from gateway_cost import FILLING, HALF, OURS, REPLICAS, SHORT, WARMING, WHOLE, Case, Running, started_replicas, tree_of
from gateway_cost import head as of_machine
from gateway_parts.prompts import Line, Prompts, train_tokenizer

from preble.cli.output import STDOUT, write_json
from preble.lab.bench.gateway import started_gateway

ROOT = Path(__file__).parents[2]
CASES = (WHOLE, Case(SHORT, "chat", 0), Case(SHORT, "text", 50))
DRAWS = 10_000


@dataclass(frozen=True)
class Turns:
    """CPU microseconds of one request, of each pair: of the earlier gateway and of today's."""

    case: Case
    before_us: list[float]
    after_us: list[float]

    @property
    def ratios(self) -> np.ndarray:
        return np.array(self.after_us) / np.array(self.before_us)

    @property
    def ratio(self) -> float:
        return float(np.median(self.ratios))

    def interval(self, seed: int = 0) -> tuple[float, float]:
        """Return between which ratios the median lies in 95 of 100 draws."""
        draws = np.random.default_rng(seed).choice(self.ratios, (DRAWS, len(self.ratios)))
        low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
        return float(low), float(high)


def source_of(commit: str, folder: Path) -> Path:
    """Return a folder with the package of that commit."""
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    return folder / "src"


@asynccontextmanager
async def started(source: Path | None, folder: Path) -> AsyncIterator[Running]:
    """Run one gateway before its replicas. `source`: of its package, None for this one. `folder`: has the tokenizer."""
    name = "after" if source is None else "before"
    async with (
        started_replicas(REPLICAS, folder / f"{name}.up.log", folder) as urls,
        started_gateway(
            urls, ["--tokenizer", str(folder), "--workers", "0"], folder / f"{name}.log", source=source
        ) as process,
    ):
        assert process.pid is not None
        yield Running(OURS, process.url, tree_of(process.pid), [])


async def ask(gateway: Running, prompts: Sequence[Sequence[Line]], case: Case) -> float:
    """Return CPU microseconds of one request."""
    gateway.disconnect()  # a gateway closes connections that were idle
    questions = [gateway.question_of(prompt, case) for prompt in prompts]
    before = await gateway.cpu_s()
    await gateway.ask_all(questions, case.connections)
    return round((await gateway.cpu_s(case.settle_s(len(prompts))) - before) * 1e6 / len(prompts), 1)


async def measure(args: argparse.Namespace, folder: Path) -> list[Turns]:
    """Fill the caches of all replicas, then ask in turns."""
    drawn = Prompts(train_tokenizer(folder), args.seed)
    source = source_of(args.commit, folder)
    rows = {case: Turns(case, [], []) for case in CASES}
    async with AsyncExitStack() as stack:
        before = await stack.enter_async_context(started(source, folder))
        after = await stack.enter_async_context(started(None, folder))
        fill = Case(SHORT, "text", 0, shared=HALF)
        filling = [drawn.draw(fill.tokens, fill.shared) for _ in range(FILLING)]
        for gateway in (before, after):
            await ask(gateway, filling, fill)
        for case in CASES:
            warming = [drawn.draw(case.tokens, case.shared) for _ in range(WARMING)]
            for gateway in (before, after):
                await ask(gateway, warming, case)
        for number in range(args.pairs):
            for case, row in rows.items():
                prompts = [drawn.draw(case.tokens, case.shared) for _ in range(case.requests(args.requests))]
                pair = [(before, row.before_us), (after, row.after_us)]
                for gateway, found in pair if number % 2 else reversed(pair):
                    found.append(await ask(gateway, prompts, case))
    return list(rows.values())


def cells_of(row: Turns) -> tuple[str, ...]:
    """Return what a table says of one kind of request."""
    low, high = row.interval()
    medians = (f"{np.median(us):.0f}" for us in (row.before_us, row.after_us))
    return (f"{row.case}".strip(), *medians, f"{row.ratio:.3f}", f"{low:.3f} to {high:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commit", help="the earlier one")
    parser.add_argument("--pairs", type=int, default=40, help="of each kind of request (default: 40)")
    parser.add_argument("--requests", type=int, default=320, help="at each turn (default: 320)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE; - for stdout")
    args = parser.parse_args()
    args.versions = {}
    with tempfile.TemporaryDirectory() as folder:
        rows = uvloop.run(measure(args, Path(folder)))
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    today = subprocess.run(describe, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    made = of_machine(args) | {"before": args.commit, "after": today.strip(), "requests": args.requests}
    write_json(args.json, made | {"turns": [asdict(row) for row in rows]})
    if args.json != STDOUT:
        print("us of CPU a request | before | after | ratio | 95 of 100 draws")
        print(*map(" | ".join, map(cells_of, rows)), sep="\n")


if __name__ == "__main__":
    main()
