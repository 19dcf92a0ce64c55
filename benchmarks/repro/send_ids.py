"""What a real engine spares when it gets token ids in place of a text it has cached: its CPU, and time to first token.

    python benchmarks/repro/send_ids.py            # vLLM and SGLang on this machine's CPU (`make engines`)

Two gateways stand in front of one engine of the tiny model, one with `tokenizing.send_ids` on, one with it off. Each
prompt is sent once, so that the engine holds it, then in turns through either gateway, one request at a time. It is a
hit: its time to first token is the work before and beside the model's. Prompts are this documentation, repeated.
CPU times are of all processes of the engine or the gateway, for one request, but for that of SGLang that computes
the model: on a CPU it takes a hundred times as much. Results: benchmarks/results/send_ids.json.
performance.py draws them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import aiohttp
import msgspec

from preble.core.types import TOKEN_BYTES, unpack_tokens
from preble.engines.starting.commands import commands_for
from preble.engines.starting.launch import LaunchOptions, ReplicaProcess
from preble.lab.bench.gateway import started_gateway
from preble.lab.report import Table
from preble.prompts.tokens.tokenizer import PromptTokenizer

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "send_ids.json"
LOGS = ROOT / "build" / "send_ids"
MODEL = ROOT / ".engines" / "models" / "tiny-llama"
SIZES = (2_000, 20_000, 100_000)
CONTEXT = 131_072
MODES = ("off", "on")
ROUNDS, REQUESTS = 8, 4
READY_S, ANSWER_S = 300.0, 1200.0
OVERRIDE = json.dumps({"max_position_embeddings": CONTEXT})
ARGS = {
    "vllm": ("--hf-overrides", OVERRIDE),
    "sglang": ("--json-model-override-args", OVERRIDE, "--sleep-on-idle"),
}


class Turn(msgspec.Struct, frozen=True):
    """Requests of one size, sent through one gateway one after another. Times in seconds; CPU times of one request.

    `first_s`: to the first token, of each request. `cached`: prompt tokens that the engine had.
    """

    engine: str
    tokens: int
    mode: str
    first_s: list[float]
    engine_cpu_s: float
    gateway_cpu_s: float
    cached: int


def prompt_of(tokens: int, tokenizer: PromptTokenizer) -> str:
    """A text of about as many tokens, a beginning of no other size's."""
    pages = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md")))
    text = f"{tokens} tokens. " + pages * (1 + tokens * 4 // len(pages))
    ids = unpack_tokens(tokenizer.completion(text[: 5 * tokens]))
    return text[: int(5 * tokens * tokens / len(ids))]


def cpu_s(process: ReplicaProcess) -> float:
    """CPU time of the process and of all that it has started, but for those of SGLang that compute, in seconds."""
    total = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = int((path / "stat").read_text().rpartition(")")[2].split()[2]) == process.pid
            if is_ours and not (path / "cmdline").read_bytes().startswith(b"sglang::"):
                total += sum(int(task.read_text().split()[0]) for task in path.glob("task/*/schedstat"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    return total / 1e9


@asynccontextmanager
async def engine_of(name: str) -> AsyncIterator[ReplicaProcess]:
    """The engine, ready, with room for the longest prompt."""
    options = LaunchOptions(
        engine="vllm" if name == "vllm" else "sglang",
        replicas=1,
        threads=1,
        log_dir=LOGS,
        model=str(MODEL),
        kv_tokens=2 * CONTEXT,
        max_model_len=CONTEXT,
        device="cpu",
        extra_args=ARGS[name],
    )
    [command] = commands_for(options)
    engine = ReplicaProcess(name, command, LOGS / f"{name}.log")
    try:
        await engine.start()
        await engine.wait_ready(READY_S)
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def gateway_of(engine: ReplicaProcess, mode: str) -> AsyncIterator[ReplicaProcess]:
    """A gateway in front of the engine, with token ids sent or not."""
    args = ["--tokenizer", str(MODEL), "--log-level", "warning", "--profile", "tiny-cpu"]
    environ = {"PREBLE_TOKENIZING__SEND_IDS": "true" if mode == "on" else "false"}
    with patch.dict(os.environ, environ):
        async with started_gateway([engine.url], args, LOGS / f"gateway-{mode}.log") as gateway:
            await check(gateway)
            yield gateway


async def check(gateway: ReplicaProcess) -> None:
    """Have the gateway check the engine; ids go out from then on. Raises: SystemExit: what it found forbids that."""
    async with aiohttp.ClientSession() as http, http.post(f"{gateway.url}/debug/parity") as answer:
        [report] = (await answer.json())["reports"]
    if any(finding["check"] == "ids" and finding["outcome"] != "verified" for finding in report["findings"]):
        raise SystemExit(f"the engine gets no ids: {report['findings']}")


async def answer(http: aiohttp.ClientSession, url: str, prompt: str) -> tuple[float, int]:
    """Send the prompt; seconds to the first token, and how many tokens of it the engine had."""
    body = {"model": str(MODEL), "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
    data = msgspec.json.encode(body | {"stream_options": {"include_usage": True}})
    started, first, cached = time.perf_counter(), 0.0, 0
    async with http.post(f"{url}/v1/completions", data=data, headers={"content-type": "application/json"}) as response:
        if response.status != 200:
            raise SystemExit(f"{url} answers {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - started
                usage = json.loads(line[6:]).get("usage") or {}
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", cached)
    return first, cached


async def measured(name: str, sizes: tuple[int, ...], rounds: int, requests: int) -> list[Turn]:
    """All turns with one engine."""
    turns: list[Turn] = []
    tokenizer = PromptTokenizer(MODEL)
    async with engine_of(name) as engine, gateway_of(engine, "off") as off, gateway_of(engine, "on") as on:
        gateways = {"off": off, "on": on}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ANSWER_S)) as http:
            for size in sizes:
                prompt = prompt_of(size, tokenizer)
                tokens = len(tokenizer.completion(prompt)) // TOKEN_BYTES
                for url in (engine.url, off.url, on.url):
                    print(name, tokens, "first", await answer(http, url, prompt), flush=True)
                for number in range(rounds):
                    for mode in MODES if number % 2 else reversed(MODES):
                        turns.append(await turn(http, (name, tokens, mode), prompt, engine, gateways[mode], requests))
                        print(turns[-1], flush=True)
    return turns


async def turn(
    http: aiohttp.ClientSession,
    of: tuple[str, int, str],
    prompt: str,
    engine: ReplicaProcess,
    gateway: ReplicaProcess,
    requests: int,
) -> Turn:
    """One turn of that many requests."""
    before = cpu_s(engine), cpu_s(gateway)
    answers = [await answer(http, gateway.url, prompt) for _ in range(requests)]
    after = cpu_s(engine), cpu_s(gateway)
    engine_cpu_s, gateway_cpu_s = ((now - then) / requests for then, now in zip(before, after, strict=True))
    cached = min(cached for _, cached in answers)
    return Turn(*of, [first for first, _ in answers], engine_cpu_s, gateway_cpu_s, cached)


def kept() -> list[Turn]:
    return msgspec.convert(msgspec.json.decode(RESULT.read_bytes())["turns"], list[Turn])


def table(turns: list[Turn]) -> Table:
    """By engine and size: medians of all requests, and of all turns for CPU times, with the text and with ids."""
    rows = []
    for engine, tokens in dict.fromkeys((turn.engine, turn.tokens) for turn in turns):
        of = {mode: [t for t in turns if (t.engine, t.tokens, t.mode) == (engine, tokens, mode)] for mode in MODES}
        first = [statistics.median(s for turn in of[mode] for s in turn.first_s) for mode in MODES]
        cpu = [statistics.median(turn.engine_cpu_s for turn in of[mode]) for mode in MODES]
        ours = [statistics.median(turn.gateway_cpu_s for turn in of[mode]) for mode in MODES]
        cells = [f"{text * 1e3:,.1f} and {ids * 1e3:,.1f}" for text, ids in (first, cpu, ours)]
        rows.append(({"vllm": "vLLM", "sglang": "SGLang"}[engine], f"{tokens:,}", *cells))
    columns = ("engine", "tokens", "first token", "CPU of the engine", "CPU of the gateway")
    return Table(columns, rows, caption="ms for a request with the text and with ids: medians.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=tuple(ARGS), action="append")
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of one turn")
    given = parser.parse_args()
    turns = [
        turn
        for name in given.engine or ARGS
        for turn in asyncio.run(measured(name, tuple(given.tokens or SIZES), given.rounds, given.requests))
    ]
    again = {(turn.engine, turn.tokens) for turn in turns}
    others = [turn for turn in kept() if (turn.engine, turn.tokens) not in again] if RESULT.exists() else []
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode({"turns": others + turns}), indent=1))


if __name__ == "__main__":
    main()
