"""Tokens computed and copied by three real vLLM, by their own counters, with copies and without.

    python benchmarks/repro/real_copies.py                # half an hour; keeps the result and draws it
    python benchmarks/repro/real_copies.py --way copies           # this way again
    python benchmarks/repro/real_copies.py --minutes 1 --try      # to try it out; keeps nothing
    python benchmarks/repro/real_copies.py --draw

The same requests at the same times, each way on engines just started, which copy through vLLM's p2p tier on this
machine's CPU. The profile is told: a copied token takes a sixteenth of a computed one, and a copy 5 ms, as on an A6000
with a link of 12.5 GB/s. So tokens are the result, and times are not: two cores do the work of three GPUs. Set up by
`make engines` and `python3 dev/setup.py nixl`. Kept: benchmarks/results/real_copies.json.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import cpu_engines
import msgspec
from made_by import note, values
from page import fill

from preble.core.costs.model import CostProfile
from preble.engines.starting.launch import Fleet
from preble.engines.starting.ports import free_ports
from preble.lab.bench.client import BenchClient
from preble.lab.bench.gateway import started_gateway
from preble.lab.bench.load import run_load
from preble.lab.metrics import RequestRecord
from preble.lab.metrics.summary import summarize
from preble.lab.workloads import Workload
from preble.profiles import load_profile, profile_json

sys.path.insert(0, str(cpu_engines.ROOT / "tests"))
from support.p2p_vllm import PromptTokens, p2p_vllm, prompt_tokens, shared_memory
from support.waiting import eventually

PAGE = cpu_engines.ROOT / "docs" / "concepts" / "copies.md"
RESULT = cpu_engines.RESULTS / "real_copies.json"
WAYS = ("no copies", "copies")
REPLICAS = 3
RPS = 5.0
MINUTES = 10.0
SEED = 26
KV_BYTES = 2048
"""Of a token of the tiny model."""
COPIED_FASTER = 16.0
READY_S = 300.0


class Counted(msgspec.Struct, frozen=True):
    """One run. Tokens: of all replicas; `prompt`: of the requests. Times of the requests in seconds. `left_out`: how
    often the gateway left a replica out of copies, since three in a row had failed.
    """

    way: str
    minutes: float
    requests: int
    failed: int
    prompt: int
    computed: float
    copied: float
    left_out: int
    ttft_p50_s: float
    ttft_p99_s: float
    e2e_mean_s: float


def profile(*, copies: bool) -> CostProfile:
    """Return that of a replica here, and of a link as fast beside it as one of 12.5 GB/s is beside a GPU."""
    told = load_profile(cpu_engines.EMULATED_PROFILE)
    if not copies:
        return told
    tokens, seconds = told.prefill_points[-2]
    return replace(told, kv_bytes_per_token=KV_BYTES, link_bytes_per_s=KV_BYTES * COPIED_FASTER * tokens / seconds)


async def measure(way: str, minutes: float) -> Counted:
    """Start three engines and a gateway, and send them the requests."""
    copies, log = way == "copies", cpu_engines.LOGS / f"{way}.log"
    workload = cpu_engines.trace(round(60 * minutes * RPS), RPS, SEED)
    with tempfile.TemporaryDirectory() as name, shared_memory():
        folder = Path(name)
        ports = free_ports(REPLICAS)
        async with AsyncExitStack() as stack:
            fleets = [_replica(folder / f"replica-{i}", port) for i, port in enumerate(ports)]
            await asyncio.gather(*(stack.enter_async_context(fleet) for fleet in fleets))
            urls = [url for fleet in fleets for url in fleet.urls]
            await asyncio.gather(*map(_ask_for_tiers, urls))
            told = folder / "told.json"
            told.write_text(profile_json(profile(copies=copies)))
            args = ["--policy", "preble", "--profile", str(told)]
            front = await stack.enter_async_context(started_gateway(urls, args, log))
            if copies:
                await eventually(lambda: _can_copy(front.url), "all replicas have copied a prompt", READY_S)
            before = await _count(urls)
            records = await send(front.url, workload)
            after = await _count(urls)
    summary = summarize(records)
    assert summary.ttft is not None and summary.e2e is not None
    return Counted(
        way=way,
        minutes=minutes,
        requests=len(records),
        failed=sum(not record.ok for record in records),
        prompt=sum(record.prompt_tokens for record in records),
        computed=after.computed - before.computed,
        copied=after.copied - before.copied,
        left_out=log.read_text().count('"copies_stopped"'),
        ttft_p50_s=summary.ttft.p50_s,
        ttft_p99_s=summary.ttft.p99_s,
        e2e_mean_s=summary.e2e.mean_s,
    )


def _replica(folder: Path, port: int) -> Fleet:
    return p2p_vllm(folder, port, kv_tokens=cpu_engines.KV_TOKENS, max_model_len=cpu_engines.MAX_MODEL_LEN)


async def _ask_for_tiers(url: str) -> None:
    """Ask as the gateway will: on a busy machine vLLM's first answer takes longer than a gateway waits for it."""
    async with aiohttp.ClientSession(url) as http, http.get("/server_info?config_format=json") as answer:
        await answer.read()


async def send(url: str, workload: Workload) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    async with BenchClient(url) as client:
        await client.find_model()
        await run_load(client, workload, records.append)
    return records


async def _count(urls: Sequence[str]) -> PromptTokens:
    counted = [await prompt_tokens(url) for url in urls]
    return PromptTokens(sum(one.computed for one in counted), sum(one.copied for one in counted))


async def _can_copy(url: str) -> bool:
    """Return whether the gateway has seen a right copy to or from each replica."""
    async with aiohttp.ClientSession(url) as http, http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    checked = [line for line in lines if line.startswith("preble_replica_parity") and 'check="copy"' in line]
    return sum(line.endswith((" 1", " 1.0")) for line in checked) >= REPLICAS - 1


def known() -> list[Counted]:
    return msgspec.json.decode(RESULT.read_bytes(), type=list[Counted]) if RESULT.exists() else []


def table(found: Sequence[Counted]) -> str:
    """Markdown: a row for each way."""
    rows = [
        "| way | requests | failed | prompt tokens | computed | copied | left out |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        shares = " | ".join(f"{n:,.0f} ({n / one.prompt:.1%})" for n in (one.computed, one.copied))
        rows.append(f"| {one.way} | {one.requests:,} | {one.failed} | {one.prompt:,} | {shares} | {one.left_out} |")
    return "\n".join(rows)


def draw() -> None:
    fill([PAGE], {"real-copies": table(known()) + "\n", **values()})


async def play(ways: Sequence[str], minutes: float) -> list[Counted]:
    found = []
    for way in ways:
        found.append(await measure(way, minutes))
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--way", choices=WAYS, action="append")
    parser.add_argument("--try", dest="only_try", action="store_true")
    parser.add_argument("--draw", action="store_true")
    given = parser.parse_args()
    if not given.draw:
        found = asyncio.run(play(given.way or WAYS, given.minutes))
        if given.only_try:
            return
        by_way = {one.way: one for one in (*known(), *found)}
        kept = [by_way[way] for way in WAYS if way in by_way]
        RESULT.write_bytes(b"[\n" + b",\n".join(map(msgspec.json.encode, kept)) + b"\n]\n")
        note("real_copies")
    draw()


if __name__ == "__main__":
    main()
