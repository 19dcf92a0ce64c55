"""What upgrades of the gateway cost its clients: SIGUSR2 starts its successor, then it leaves.

    python benchmarks/repro/upgrades.py                              # two minutes on a quiet machine; not on Windows
    python benchmarks/repro/upgrades.py --per-second 20 --json out.json
    python benchmarks/repro/upgrades.py --fill                       # only fill the page in from the kept result

`preble serve` with its default number of processes, in front of two emulated replicas with KV events. Requests come at
a steady rate, every second one streamed, on kept connections. Five times the first process gets SIGUSR2, each time some
seconds after the last successor began to serve. A request is lost if it gets anything but its whole answer; nobody
tries again.
Latencies are compared between requests that were under way while a successor started or took over, and those that
were not: a successor that starts takes CPU time from the gateway too. Status 1 if a request is lost.
Result: benchmarks/results/upgrades.json, and the table in docs/reference/failures.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec
from page import filled, markdown

from preble.lab.report import Table

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "upgrades.json"
PAGE = ROOT / "docs" / "reference" / "failures.md"
UPGRADES, QUIET_S, HANDOVER_S = 5, 10.0, 6.0
"""`HANDOVER_S`: the old gateway ends kept connections for `timeouts.drain_s`, 4 s, after its successor serves."""
PREFIXES, WORDS = 20, 100


class Latencies(msgspec.Struct, frozen=True):
    """Of the whole answers to requests of one kind, in seconds."""

    requests: int
    p50_s: float
    p99_s: float
    slowest_s: float


class Result(msgspec.Struct, frozen=True):
    """`start_s`: from each SIGUSR2 until the successor serves. `quiet`: while nothing was upgraded. `hit_rates`: shares
    of prompt tokens that the replicas had cached, in the quiet phase before each upgrade and after the last one.
    `lost`: what its client got of each request that was. `load`: of the machine, at the end."""

    per_second: float
    requests: int
    streams: int
    upgrades: int
    lost: list[str]
    quiet: Latencies
    starting: Latencies
    handover: Latencies
    start_s: list[float]
    hit_rates: list[float]
    load: float


class Answer(msgspec.Struct, frozen=True):
    """One request and what became of it. `wrong`: None if nothing was."""

    at: float
    took_s: float
    wrong: str | None
    prompt_tokens: int
    cached_tokens: int


async def _preble(stack: AsyncExitStack, *arguments: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "preble", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PREBLE_PARITY__ENABLED": "false"},
    )
    stack.callback(_end, process.pid)
    return process


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


async def _url(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async for line in process.stdout:
        if b"http://" in line:
            return "http://" + line.decode().split("http://")[1].split()[0]
    raise RuntimeError("the process did not start")


class Gateway:
    """The gateway and its successors, which all write to one log. `pid`: of the one that serves."""

    def __init__(self, process: asyncio.subprocess.Process, stack: AsyncExitStack) -> None:
        self.pid = process.pid
        self._stack = stack
        self._serves: asyncio.Queue[int] = asyncio.Queue()
        assert process.stderr is not None
        self._reading = asyncio.create_task(self._read(process.stderr))

    async def _read(self, log: asyncio.StreamReader) -> None:
        async for line in log:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event["event"] == "upgraded":
                    self._stack.callback(_end, event["successor"])
                    self._serves.put_nowait(event["successor"])
                elif event["event"] == "upgrade_failed":
                    raise RuntimeError(event["error"])

    async def upgrade(self) -> None:
        """Return once the successor serves."""
        os.kill(self.pid, signal.SIGUSR2)
        self.pid = await self._serves.get()


async def _ask(http: aiohttp.ClientSession, number: int) -> Answer:
    loop = asyncio.get_running_loop()
    at = loop.time()
    prompt = f"document {number % PREFIXES} " * WORDS + f"question {number}"
    streams = number % 2 == 0
    body = {"model": "emulated", "prompt": prompt, "max_tokens": 16, "stream": streams}
    body |= {"stream_options": {"include_usage": True}} if streams else {}
    wrong, usage = None, {}
    try:
        async with http.post("/v1/completions", json=body) as answer:
            text = await answer.text()
            if answer.status != 200 or (streams and "[DONE]" not in text):
                wrong = f"{answer.status} {text[-200:]}"
            else:
                last = text.split("data: ")[-2] if streams else text
                usage = json.loads(last)["usage"]
    except (aiohttp.ClientError, TimeoutError) as error:
        wrong = repr(error)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(at, loop.time() - at, wrong, usage.get("prompt_tokens", 0), cached)


def _latencies(answers: list[Answer]) -> Latencies:
    times = sorted(answer.took_s for answer in answers) or [0.0]
    p50_s, p99_s = (round(times[int(len(times) * share)], 3) for share in (0.5, 0.99))
    return Latencies(len(answers), p50_s, p99_s, round(times[-1], 3))


async def run(per_second: float) -> Result:
    """Send the load, and upgrade the gateway meanwhile."""
    async with AsyncExitStack() as stack:
        options = (
            "emulate",
            "--profile",
            "tiny-cpu",
            "--port",
            "0",
            "--events-port",
            "0",
            "--model",
            "emulated",
            "--log-level",
            "error",
        )
        replicas = [await _preble(stack, *options) for _ in range(2)]
        urls = [argument for replica in replicas for argument in ("--replica", await _url(replica))]
        process = await _preble(stack, "serve", *urls, "--port", "0", "--log-format", "json")
        gateway, url = Gateway(process, stack), await _url(process)
        http = await stack.enter_async_context(aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)))
        while (await _ask(http, 0)).wrong is not None:  # noqa: ASYNC110 (each look is a request)
            await asyncio.sleep(0.1)
        loop = asyncio.get_running_loop()
        asked: list[asyncio.Task[Answer]] = []

        async def send() -> None:
            begins = loop.time()
            while True:
                await asyncio.sleep(max(0.0, begins + len(asked) / per_second - loop.time()))
                asked.append(asyncio.create_task(_ask(http, len(asked))))

        sending = asyncio.create_task(send())
        told, served = [], []
        for _ in range(UPGRADES):
            await asyncio.sleep(QUIET_S)
            told.append(loop.time())
            await gateway.upgrade()
            served.append(loop.time())
            await asyncio.sleep(HANDOVER_S)
        await asyncio.sleep(QUIET_S)
        sending.cancel()
        answers = await asyncio.gather(*asked)

    def phase(answer: Answer) -> str:
        for begins, ends in zip(told, served, strict=True):
            if answer.at < ends + HANDOVER_S and answer.at + answer.took_s > ends:
                return "handover"
            if answer.at < ends and answer.at + answer.took_s > begins:
                return "starting"
        return "quiet"

    phases = {name: [one for one in answers if phase(one) == name] for name in ("quiet", "starting", "handover")}
    hits = []
    for before, after in zip([0.0, *(at + HANDOVER_S for at in served)], [*told, float("inf")], strict=True):
        quiet = [one for one in answers if before <= one.at and one.at + one.took_s < after]
        hits.append(round(sum(one.cached_tokens for one in quiet) / max(1, sum(one.prompt_tokens for one in quiet)), 3))
    return Result(
        per_second=per_second,
        requests=len(answers),
        streams=(len(answers) + 1) // 2,
        upgrades=len(served),
        lost=[one.wrong for one in answers if one.wrong is not None],
        **{name: _latencies(found) for name, found in phases.items()},
        start_s=[round(end - begin, 1) for begin, end in zip(told, served, strict=True)],
        hit_rates=hits,
        load=round(os.getloadavg()[0], 1),
    )


def table(result: Result) -> str:
    """The table of the page."""
    names = {"quiet": "while nothing changed", "starting": "while a successor started", "handover": "at a handover"}
    rows = []
    for name, meaning in names.items():
        found: Latencies = getattr(result, name)
        rows.append(
            (meaning, found.requests, f"{found.p50_s:.2f} s", f"{found.p99_s:.2f} s", f"{found.slowest_s:.2f} s")
        )
    hits = ", ".join(f"{100 * rate:.0f}" for rate in result.hit_rates)
    sent = f"{result.requests} requests, {result.per_second:g} a second"
    found_again = f"Hit rates in percent before the first upgrade and after each one: {hits}"
    starts = f"successors served after {min(result.start_s):g} to {max(result.start_s):g} s"
    caption = (
        f"{sent}; {result.upgrades} upgrades, {len(result.lost)} lost; {starts}. {found_again}. "
        f"Load of the machine, which has two cores: {result.load:g}."
    )
    return markdown(Table(("requests under way", "how many", "p50", "p99", "slowest"), rows, caption=caption))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-second", type=float, default=100.0, help="requests [default: %(default)s]")
    parser.add_argument("--json", type=Path, help="where to write the result; the page stays as it is")
    parser.add_argument("--fill", action="store_true", help="only fill the page in from the kept result")
    arguments = parser.parse_args()
    if not arguments.fill:
        result = asyncio.run(run(arguments.per_second))
        formatted = msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"
        (arguments.json or RESULT).write_bytes(formatted)
        if arguments.json is not None:
            return int(bool(result.lost))
    kept = msgspec.json.decode(RESULT.read_bytes(), type=Result)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), {"upgrades": table(kept)}), encoding="utf-8")
    return int(bool(kept.lost))


if __name__ == "__main__":
    sys.exit(main())
