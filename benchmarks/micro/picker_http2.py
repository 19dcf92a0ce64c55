"""What the endpoint picker costs over different HTTP/2: the library h2, one by hand, and grpcio. CPU seconds a request.

One arm for each, in turns, with the same requests: Envoy asks `preble epp`, both bodies full duplex, in front of the
same replicas that compute nothing. The CPU time is the system's count for all threads of the picker's process. `h2` is
what the picker has, with its limits; `hand` is what it had before, without any (docs/decisions/0010).

    python3 dev/setup.py envoy
    python benchmarks/micro/picker_http2.py --json benchmarks/results/picker_http2.json
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import uvloop
from gateway_cost import REPLICAS, started_replicas, tell
from gateway_parts.load import connected
from gateway_parts.prompts import Prompts, train_tokenizer
from picker_cost import (
    CASES,
    CONNECTIONS,
    Arm,
    Cost,
    arguments,
    clock_of,
    costs,
    started_envoy,
    started_picker,
    until_served,
)

from preble.cli.output import STDOUT, write_json

BY_HAND = "hand"
KINDS = (BY_HAND, "h2", "grpcio")
PROGRAM = Path(__file__).parent / "picker_parts" / "epp_by.py"


@asynccontextmanager
async def started_arm(kind: str, urls: list[str], folder: Path) -> AsyncIterator[Arm]:
    """A picker over one kind of HTTP/2, and the Envoy that asks it."""
    folder.mkdir()  # noqa: ASYNC240 (nothing else runs yet)
    args = ["--tokenizer", str(folder.parent), "--log-level", "warning"]
    async with AsyncExitStack() as stack:
        argv = (sys.executable, str(PROGRAM), kind)
        picker, port = await stack.enter_async_context(started_picker(urls, args, folder, argv))
        _, url = await stack.enter_async_context(started_envoy(port, urls, folder))
        await until_served(url)
        yield Arm({kind: clock_of(picker)}, [await connected(url) for _ in range(CONNECTIONS)])


async def measure(args: argparse.Namespace, folder: Path) -> list[Cost]:
    prompts = Prompts(train_tokenizer(folder), args.seed)
    async with AsyncExitStack() as stack:
        urls = await stack.enter_async_context(started_replicas(REPLICAS, folder / "replicas.log"))
        arms = [await stack.enter_async_context(started_arm(kind, urls, folder / kind)) for kind in KINDS]
        return await costs(arms, prompts, args)


def table(rows: list[Cost]) -> str:
    """The cheapest round of each, and the median over the rounds of how many times the cost by hand it is."""
    by = {(row.process, row.case): row.rounds_us for row in rows}
    lines = [f"{'us of CPU a request':26}" + "".join(f" {kind:>16}" for kind in KINDS)]
    for case in CASES:
        cells = []
        for kind in KINDS:
            ratios = sorted(one / hand for one, hand in zip(by[kind, case], by[BY_HAND, case], strict=True))
            cells.append(f" {min(by[kind, case]):8.0f} {ratios[len(ratios) // 2]:5.2f} x")
        lines.append(f"{case!s:26}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    args = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        rows = uvloop.run(measure(args, Path(folder)))
    head = {
        "machine": f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}",
        "seed": args.seed,
        "requests": args.requests,
    }
    write_json(args.json, head | {"costs": [asdict(row) for row in rows]})
    tell("")
    if args.json != STDOUT:
        print(table(rows))


if __name__ == "__main__":
    main()
