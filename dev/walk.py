"""How far one request walks through the code: files, functions, calls, and returns to a file that was left.

    .venv/bin/python dev/walk.py             # two fake replicas and a gateway, all in this process; a few seconds
    .venv/bin/python dev/walk.py --files     # also the files, in the order in which they are entered
    .venv/bin/python dev/walk.py --sequence  # every call of a completion instead, below its caller

A function counts when Python enters it, so the compiled core would hide its calls: run it on the plain package. Health
checks, KV events and a tokenizer are left out, and so are the server's time limits, which are looked at by the clock.
It also counts the definitions that have the words of one fact in their names.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import aiohttp

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "preble"
sys.path.insert(0, str(ROOT / "tests"))


class Call(NamedTuple):
    """`depth`: how many functions of the package are above it."""

    file: str
    function: str
    depth: int


BY_THE_CLOCK = {"on_time", "_sweep", "_renew_date"}
FACTS = {
    "first token": r"first_?token|prefill_complete|first_byte|has_token|\bbegun\b|token_came",
    "the end": r"(^|_)(ended|over|finished|end_once|completed?)($|_)",
}
END = ("serving/placed.py", "end")
"""What the end of a placement begins with."""
WARM_UP = 3
SETTLE_S = 0.1


class Walk:
    """The calls of functions of the package while it is entered."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __enter__(self) -> Walk:
        sys.setprofile(self._on)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on(self, frame: FrameType, event: str, _: object) -> None:
        path, function = frame.f_code.co_filename, frame.f_code.co_qualname
        if event != "call" or not path.startswith(str(SRC)) or frame.f_code.co_name in BY_THE_CLOCK:
            return
        above, depth = frame.f_back, 0
        while above is not None:
            depth += above.f_code.co_filename.startswith(str(SRC))
            above = above.f_back
        self.calls.append(Call(str(Path(path).relative_to(SRC)), function.replace(".<locals>", ""), depth))

    def from_call_of(self, file: str, function: str) -> list[Call]:
        """The calls from the first one of this function on."""
        at = [(call.file, call.function.rpartition(".")[2]) for call in self.calls].index((file, function))
        return self.calls[at:]


def told(name: str, calls: list[Call], *, with_files: bool) -> str:
    """One line of figures about calls."""
    visits = [call.file for i, call in enumerate(calls) if i == 0 or calls[i - 1].file != call.file]
    files, functions = list(dict.fromkeys(visits)), {(call.file, call.function) for call in calls}
    figures = f"{len(files)} files, {len(functions)} functions, {len(calls)} calls, {len(visits) - len(files)} returns"
    return "\n  ".join([f"{name}: {figures}", *(files if with_files else [])])


def sequence(calls: list[Call]) -> str:
    """Return a line for each call, below its caller; the file stands where another one is entered."""
    lines = []
    for i, call in enumerate(calls):
        file = "" if i and calls[i - 1].file == call.file else f"  ({call.file})"
        lines.append(f"{'  ' * call.depth}{call.function}{file}")
    return "\n".join(lines)


def definitions(pattern: str) -> int:
    """How many functions and classes of the package have a name that matches."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = (node for path in SRC.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return sum(bool(re.search(pattern, _words(node.name))) for node in nodes if isinstance(node, kinds))


def _words(name: str) -> str:
    """`PeerFirstToken` -> `peer_first_token`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


async def walked(**fields: Any) -> Walk:
    """The walk of one completion that a gateway on two fake replicas answers."""
    from gateway.fakes import replicas
    from preble.config import HealthConfig
    from support.gateways import quick_gateway
    from support.waiting import eventually

    health = HealthConfig(check_interval_s=300.0, retry_min_s=0.02, retry_max_s=0.05)
    async with (
        replicas(2) as fakes,
        quick_gateway([fake.url for fake in fakes], "preble", health=health) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        await eventually(lambda: len(gateway.serving.replicas) == 2)

        async def ask() -> None:
            body = {"model": "tiny", "prompt": "hello " * 50, **fields}
            async with http.post("/v1/completions", json=body) as answer:
                await answer.read()
            await asyncio.sleep(SETTLE_S)

        for _ in range(WARM_UP):
            await ask()
        with Walk() as walk:
            await ask()
        return walk


def main(say: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="also name the files")
    parser.add_argument("--sequence", action="store_true", help="name the calls of a completion instead")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    whole = asyncio.run(walked())
    if given.sequence:
        say(sequence(whole.calls))
        return
    streamed = asyncio.run(walked(stream=True))
    say(told("a completion, whole answer", whole.calls, with_files=given.files))
    say(told("a completion, streamed", streamed.calls, with_files=given.files))
    say(told("the end of a whole answer", whole.from_call_of(*END), with_files=given.files))
    for fact, pattern in FACTS.items():
        say(f"definitions named after {fact}: {definitions(pattern)}")


if __name__ == "__main__":
    main()
