"""Gateways in front of emulated replicas that cache: hits, imbalance, times and throughput, beside other routers.

Tool use, documents and one hot prefix, in a closed loop: each client sends its next request when it has its answer.
Every run has four new replicas (`preble emulate`, in real time, with KV events) and a new gateway, each a process of
its own, and the same requests in the same order. Nothing else may run meanwhile.

    python benchmarks/micro/gateway_cluster.py --router router/bin/sglang-router --smg smg/bin/smg --json result.json
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import uvloop
from gateway_cost import (
    DEFAULT,
    PREBLE,
    REPLICAS,
    ROUTER,
    SHEPHERD,
    SMG,
    THEIRS,
    Arm,
    add_common_options,
    head,
    started_router,
    tell,
    versions,
)
from gateway_parts.prompts import documentation_lines, train_tokenizer
from gateway_rate import busy_s

from preble.cli.output import STDOUT, write_json
from preble.engines.starting.launch import Fleet, LaunchOptions
from preble.lab.bench.client import BenchClient
from preble.lab.bench.counters import read_counters, total
from preble.lab.bench.gateway import started_gateway
from preble.lab.bench.load import run_load
from preble.lab.metrics import RequestRecord, summarize
from preble.lab.workloads import Segment, Workload, WorkloadRequest, make_workload

ARMS = [DEFAULT, Arm(PREBLE, "round_robin", workers=1), THEIRS, SHEPHERD]
PROFILE, MODEL = "a6000-mistral-7b", "emulated"
DOCUMENTS, DOCUMENT_CHARS, ANSWER_TOKENS = 30, 26_000, (8, 24)


@dataclass(frozen=True)
class Case:
    """A workload of `requests`, `at_once` of them always under way. `kv_tokens`: of each replica."""

    name: str
    requests: int
    at_once: int
    kv_tokens: int

    def workload(self, seed: int, requests: int) -> Workload:
        made = {
            "tool use": partial(make_workload, "tool_use"),
            "hot prefix": partial(make_workload, "tool_use", zipf=2.0),
            "documents": documents,
        }[self.name](requests, seed)
        return in_turns(made, self.at_once)


CASES = [Case("tool use", 600, 32, 40_000), Case("documents", 160, 16, 60_000), Case("hot prefix", 800, 64, 40_000)]


@dataclass(frozen=True)
class Run:
    """One case through one gateway. `imbalance`: prompt tokens of the busiest replica over the mean. `busy`: processors
    that were, on average. Times in seconds."""

    case: str
    arm: Arm
    errors: int
    hit_rate: float
    imbalance: float
    ttft_p50_s: float
    ttft_p99_s: float
    e2e_p50_s: float
    e2e_p99_s: float
    requests_per_s: float
    busy: float


def documents(num_requests: int, seed: int) -> Workload:
    """Questions about long documents, which are stretches of this documentation's lines; all are as popular."""
    rng, lines = random.Random(f"documents/{seed}"), documentation_lines()
    texts = ["".join(rng.choices(lines, k=DOCUMENT_CHARS // 50))[:DOCUMENT_CHARS] for _ in range(DOCUMENTS)]
    segments = [Segment(f"document {i}", text=text) for i, text in enumerate(texts)]

    def asked(number: int) -> WorkloadRequest:
        question = Segment(text=f"\n\nQuestion {number}: what follows from {rng.choice(lines).strip()!r}?\n")
        return WorkloadRequest(f"documents-{number}", (rng.choice(segments), question), rng.randint(*ANSWER_TOKENS))

    return Workload("documents", tuple(map(asked, range(num_requests))))


def in_turns(workload: Workload, at_once: int) -> Workload:
    """The same requests from `at_once` clients: each waits for the one that is so many before it."""
    ids = [request.request_id for request in workload.requests]
    parents = [None] * at_once + ids
    waiting = (replace(r, parent=p, arrival_s=0.0) for r, p in zip(workload.requests, parents, strict=False))
    return replace(workload, requests=tuple(waiting))


async def run(case: Case, arm: Arm, program: Path | None, folder: Path, load: Workload) -> Run:
    log, tokenizer = folder / f"{case.name} {arm.program} {arm.setting}", ("--tokenizer", str(folder))
    options = LaunchOptions(
        engine="emulator",
        replicas=REPLICAS,
        log_dir=log,
        profile=PROFILE,
        kv_tokens=case.kv_tokens,
        extra_args=(*tokenizer, "--model", MODEL),
    )
    records: list[RequestRecord] = []
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(options))
        if program is None:
            serve = ("--policy", arm.policy, "--profile", PROFILE, "--workers", str(arm.workers), *tokenizer)
            gateway = await stack.enter_async_context(started_gateway(fleet.urls, serve, log / "gateway.log"))
        else:
            gateway = await stack.enter_async_context(started_router(program, fleet.urls, arm, log / "gateway.log"))
        client = await stack.enter_async_context(BenchClient(gateway.url, model=MODEL))
        before, busy_before, started_at = await read_counters(fleet.urls), busy_s(), time.monotonic()
        await run_load(client, load, records.append)
        busy = (busy_s() - busy_before) / (time.monotonic() - started_at)
        after = await read_counters(fleet.urls)
    spent = {url: after[url].since(before[url]) for url in fleet.urls}
    tokens = [of_replica.queried_tokens for of_replica in spent.values()]
    summary = summarize(records)
    if summary.ttft is None or summary.e2e is None:
        raise RuntimeError(f"{arm.program} answered nothing: {summary.errors_by_kind}; see {log}")
    return Run(
        case.name,
        arm,
        summary.errors,
        round(total(spent).hit_rate, 4),
        round(max(tokens) * len(tokens) / sum(tokens), 3),
        round(summary.ttft.p50_s, 4),
        round(summary.ttft.p99_s, 4),
        round(summary.e2e.p50_s, 4),
        round(summary.e2e.p99_s, 4),
        round(summary.requests_per_s, 2),
        round(busy, 2),
    )


async def measure(args: argparse.Namespace, folder: Path) -> list[Run]:
    train_tokenizer(folder)
    programs = {PREBLE: None, ROUTER: args.router, SMG: args.smg}
    arms = [arm for arm in ARMS if arm.program == PREBLE or programs[arm.program] is not None]
    found = []
    for number in range(args.rounds):
        for case in CASES:
            load = case.workload(args.seed + number, round(case.requests * args.scale))
            for arm in arms:
                tell(f"round {number + 1} of {args.rounds}: {case.name}, {arm.program} {arm.setting}")
                found.append(await run(case, arm, programs[arm.program], folder, load))
    return found


def rows_of(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Case, gateway and the means over the rounds, as text."""
    rows = []
    for case, arm in dict.fromkeys((run.case, run.arm) for run in runs):
        of_it = [run for run in runs if (run.case, run.arm) == (case, arm)]

        def mean(name: str, of_it: Sequence[Run] = of_it) -> float:
            return sum(getattr(run, name) for run in of_it) / len(of_it)

        ms = [f"{1e3 * mean(name):.0f}" for name in ("ttft_p50_s", "ttft_p99_s", "e2e_p50_s", "e2e_p99_s")]
        numbers = (f"{mean('hit_rate'):.3f}", f"{mean('imbalance'):.2f}", *ms, f"{mean('requests_per_s'):.1f}")
        rows.append((case, f"{arm.program} {arm.setting}", *numbers, str(sum(run.errors for run in of_it))))
    return rows


COLUMNS = ("", "gateway", "hits", "imbalance", "TTFT p50 ms", "p99", "E2E p50 ms", "p99", "requests/s", "failed")


def table(runs: Sequence[Run]) -> str:
    rows = [COLUMNS, *rows_of(runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1, help="runs of each case, with other seeds (default: 1)")
    parser.add_argument("--scale", type=float, default=1.0, help="times as many requests (default: 1)")
    add_common_options(parser)
    args = parser.parse_args()
    args.versions = versions(args.router, args.smg)
    made = head(args) | {"profile": PROFILE, "scale": args.scale, "processors": os.cpu_count()}
    with tempfile.TemporaryDirectory() as folder:
        runs = uvloop.run(measure(args, Path(folder)))
    write_json(args.json, made | {"runs": [asdict(run) for run in runs]})
    tell("")
    if args.json != STDOUT:
        print(table(runs))


if __name__ == "__main__":
    main()
