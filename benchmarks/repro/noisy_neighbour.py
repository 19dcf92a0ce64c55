"""What a tenant that floods the fleet does to another: placed as they come, and in turns.

    python benchmarks/repro/noisy_neighbour.py simulated gateway-simulated gateway        # half an hour
    python benchmarks/repro/noisy_neighbour.py simulated --json result.json

Two tenants ask about tools (ToolBench), each with prompts of its own. One asks at a steady rate, below its half of what
the fleet can serve. The other begins later and sends 20 times its half. Three runs: the steady tenant alone; both
placed as they come; both in turns. `simulated`: four replicas, eight seeds. `gateway`: two emulated replicas, slow ones
so that a busy machine keeps their time, behind a real gateway, the tenants with keys; eight seeds, six runs at a time,
since one takes a tenth of a core; "as they come" is `queue.enabled = false`, and has one seed. `gateway-simulated`: the
same case on simulated replicas, eight seeds. The last lines have the p99 of all
seeds' requests together, and how many times that of the tenant alone it is, with the 95 % interval of drawing the seeds
anew (bootstrap).
Result: benchmarks/results/noisy_neighbour.json.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path

import aiohttp
import msgspec

from preble.config import AuthConfig, GatewayConfig, ParityConfig, QueueConfig, ReplicaConfig
from preble.core.admission.admission import FairAdmission
from preble.core.admission.fair_queue import QueueSettings
from preble.core.costs.model import CostModel, CostProfile
from preble.core.types import ReplicaId
from preble.engines.starting.commands import LaunchOptions
from preble.engines.starting.launch import Fleet
from preble.gateway.server import serving
from preble.lab.sim import SimConfig, Simulation
from preble.lab.workloads import Workload, WorkloadRequest
from preble.lab.workloads.mix import mixed
from preble.lab.workloads.registry import make_workload
from preble.logs import configure_logging
from preble.profiles import load_profile, profile_json

RESULT = Path(__file__).parents[1] / "results" / "noisy_neighbour.json"
STEADY, FLOOD = "steady", "flood"
TIMES_ITS_SHARE = 20
SEEDS = {"simulated": range(1, 9), "gateway-simulated": range(1, 9), "gateway": range(1, 9)}


@dataclass(frozen=True)
class Case:
    """`share`: requests a second that are half of what the fleet serves. `steady`: what the steady tenant sends."""

    profile: str
    replicas: int
    share: float
    steady: float
    seconds: float
    flood_begins_s: float
    flood_requests: int


SIMULATED = Case("a100-mistral-7b", 4, 70.0, 40.0, 15.0, 5.0, 6000)
GATEWAY = Case("a100x2-llama-3-70b", 2, 2.5, 1.0, 160.0, 40.0, 800)
AT_ONCE = 6
"""Runs at the same time."""
SLOWER = 4.0
"""How many times slower than the profile the emulated replicas are, so that a busy machine can keep their time. All
times of the queue are as much longer."""


class Run(msgspec.Struct, frozen=True):
    """One run. TTFT in seconds, of the steady tenant's requests. `hit_rate`: of all prompt tokens, both tenants'.

    `late_p99_s`: by how much this process woke up late, which adds to what it measures: a busy machine.
    """

    where: str
    how: str
    seed: int
    requests: int
    failed: int
    ttft_p50_s: float
    ttft_p99_s: float
    hit_rate: float
    late_p99_s: float = 0.0


class Summary(msgspec.Struct, frozen=True):
    """All seeds of one way. `times_alone`: its p99 over that of the same seeds alone; `low`, `high`: 95 % interval."""

    where: str
    how: str
    seeds: int
    ttft_p99_s: float
    times_alone: float
    low: float
    high: float
    hit_rate: float


TTFTs = list[float]
Runs = dict[tuple[str, str, int], tuple[Run, TTFTs]]


def summary(runs: Runs, where: str, how: str) -> Summary:
    """Return all seeds of one way together."""
    seeds = [seed for at, way, seed in runs if (at, way) == (where, how)]
    draws = random.Random(0)

    def p99(way: str, drawn: list[int]) -> float:
        return _percentile([ttft for seed in drawn for ttft in runs[where, way, seed][1]], 0.99)

    ratios = []
    for _ in range(1000):
        drawn = draws.choices(seeds, k=len(seeds))
        ratios.append(p99(how, drawn) / p99("alone", drawn))
    times = round(p99(how, seeds) / p99("alone", seeds), 2)
    hit_rate = round(sum(runs[where, how, seed][0].hit_rate for seed in seeds) / len(seeds), 4)
    low, high = (round(_percentile(ratios, share), 2) for share in (0.025, 0.975))
    return Summary(where, how, len(seeds), p99(how, seeds), times, low, high, hit_rate)


def _arriving(workload: Workload, per_second: float, seed: int, start_s: float = 0.0) -> Workload:
    rng = random.Random(seed)
    times, now = [], start_s
    for _ in workload.openers:
        now += rng.expovariate(per_second)
        times.append(now)
    return workload.with_arrivals(times)


def tenants(case: Case, seed: int) -> tuple[Workload, Workload]:
    """Return the requests of the steady tenant and of the flood."""
    steady = make_workload("toolbench", int(case.steady * case.seconds), 10 * seed + 1)
    flood = make_workload("toolbench", case.flood_requests, 10 * seed + 2)
    rate = TIMES_ITS_SHARE * case.share
    return (
        _arriving(steady, case.steady, 10 * seed + 3),
        _arriving(flood, rate, 10 * seed + 4, case.flood_begins_s),
    )


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(int(len(ordered) * share), len(ordered) - 1)], 3) if ordered else float("inf")


# simulated


def simulated(where: str, how: str, seed: int) -> tuple[Run, TTFTs]:
    case, slower = (SIMULATED, 1.0) if where == "simulated" else (GATEWAY, SLOWER)
    steady, flood = tenants(case, seed)
    workload = mixed("tenants", [steady] if how == "alone" else [steady, flood])
    profile = _slower(load_profile(case.profile), slower)
    # Requests wait as long as it takes, so that all runs serve the same requests.
    patient = QueueSettings(max_waiting=10**6, max_wait_s=1e9, credit_s=slower * QueueConfig().credit_s)
    depth_s = slower * QueueConfig().depth_s
    admission = FairAdmission(CostModel(profile), patient, depth_s=depth_s) if how == "in turns" else None
    config = SimConfig(profile=profile, replicas=case.replicas)
    simulation = Simulation(
        config, workload, admission=admission, tenant_of=lambda asked: asked.request_id.partition(":")[0]
    )
    records = simulation.run().records
    ours = [record for record in records if record.request_id.startswith("0:")]
    ttfts = [record.ttft_s for record in ours if record.ttft_s is not None]
    cached = sum(record.cached_tokens or 0 for record in records)
    hit_rate = round(cached / sum(record.prompt_tokens for record in records), 4)
    failed = sum(not record.ok for record in ours)
    p50_s, p99_s = _percentile(ttfts, 0.5), _percentile(ttfts, 0.99)
    return Run(where, how, seed, len(ours), failed, p50_s, p99_s, hit_rate), ttfts


# through the gateway


def _slower(profile: CostProfile, times_slower: float) -> CostProfile:
    points = tuple((tokens, times_slower * seconds) for tokens, seconds in profile.prefill_points)
    timed = [field.name for field in fields(profile) if field.name.endswith("_s") or "_s_per_" in field.name]
    times = {name: times_slower * seconds for name in timed if (seconds := getattr(profile, name))}
    return replace(profile, prefill_points=points, **times)


class Tokens:
    """What the answers of a run say of its prompts."""

    def __init__(self) -> None:
        self.prompt = self.cached = 0


async def through_gateway(how: str, seed: int, folder: Path) -> tuple[Run, TTFTs]:
    case = GATEWAY
    steady, flood = tenants(case, seed)
    keys = folder / "keys.toml"
    names = (STEADY, FLOOD)
    text = "".join(f'[{name}]\nsha256 = "{sha256(name.encode()).hexdigest()}"\n' for name in names)
    await asyncio.to_thread(keys.write_text, text)
    slow = folder / "slow.json"
    await asyncio.to_thread(slow.write_text, profile_json(_slower(load_profile(case.profile), SLOWER)))
    logs = folder / f"{how}-{seed}"
    options = LaunchOptions(engine="emulator", replicas=case.replicas, log_dir=logs, profile=str(slow))
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(options))
        config = GatewayConfig(
            replicas=tuple(ReplicaConfig(url) for url in fleet.urls),
            profile=str(slow),
            port=0,
            parity=ParityConfig(enabled=False),
            auth=AuthConfig(keys_file=str(keys)),
            queue=QueueConfig(
                enabled=how == "in turns",
                depth_s=SLOWER * QueueConfig().depth_s,
                credit_s=SLOWER * QueueConfig().credit_s,
                max_wait_s=1e6,
            ),
        )
        gateway = await stack.enter_async_context(serving(config))
        while any(ReplicaId(url) not in gateway.serving.replicas for url in fleet.urls):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(gateway.url, connector=connector))
        return await _load(http, how, seed, steady, None if how == "alone" else flood)


async def _load(
    http: aiohttp.ClientSession, how: str, seed: int, steady: Workload, flood: Workload | None
) -> tuple[Run, TTFTs]:
    start, tokens, late = asyncio.get_running_loop().time() + 0.1, Tokens(), TTFTs()
    beside = [asyncio.create_task(_ask(http, FLOOD, r, start, tokens)) for r in (flood.requests if flood else ())]
    beside.append(asyncio.create_task(_watch_the_clock(late)))
    ours = [asyncio.create_task(_ask(http, STEADY, request, start, tokens)) for request in steady.requests]
    ttfts = [ttft for ttft in await asyncio.gather(*ours) if ttft is not None]
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    hit_rate = round(tokens.cached / max(tokens.prompt, 1), 4)
    p50_s, p99_s = _percentile(ttfts, 0.5), _percentile(ttfts, 0.99)
    failed = len(ours) - len(ttfts)
    return Run("gateway", how, seed, len(ours), failed, p50_s, p99_s, hit_rate, _percentile(late, 0.99)), ttfts


async def _watch_the_clock(late: TTFTs) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + 0.01
        await asyncio.sleep(0.01)
        late.append(loop.time() - due)


async def _ask(
    http: aiohttp.ClientSession, key: str, request: WorkloadRequest, start: float, tokens: Tokens
) -> float | None:
    """Return the time to the first token, None for a failure."""
    loop = asyncio.get_running_loop()
    at = start + (request.arrival_s or 0.0)
    await asyncio.sleep(max(0.0, at - loop.time()))
    body = {
        "prompt": request.prompt(),
        "max_tokens": request.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with http.post("/v1/completions", json=body, headers={"x-api-key": key}) as answer:
            first = await answer.content.readany()
            ttft = loop.time() - at
            rest = await answer.read()
            if answer.status != 200 or not first:
                return None
            _count((first + rest).rstrip().splitlines(), tokens)
            return ttft
    except (aiohttp.ClientError, TimeoutError):
        return None


def _count(lines: list[bytes], tokens: Tokens) -> None:
    for line in lines:
        if b'"prompt_tokens"' in line:
            usage = msgspec.json.decode(line.removeprefix(b"data: "))["usage"]
            tokens.prompt += usage["prompt_tokens"]
            tokens.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def run(where: str, how: str, seed: int) -> tuple[Run, TTFTs]:
    """Carry out one run, in a process of its own."""
    configure_logging("error", "console")
    if where != "gateway":
        return simulated(where, how, seed)
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(through_gateway(how, seed, Path(folder)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", nargs="+", choices=[*SEEDS])
    parser.add_argument("--json", type=Path, help=f"where to write the result, such as {RESULT.name}")
    arguments = parser.parse_args()
    asked = [
        (where, how, seed)
        for where in arguments.where
        for seed in SEEDS[where]
        for how in ("alone", "in turns", "as they come")
        if (where, how) != ("gateway", "as they come") or seed == 1
    ]
    runs: Runs = {}
    with ProcessPoolExecutor(AT_ONCE, multiprocessing.get_context("spawn")) as processes:
        for key, made in zip(asked, processes.map(run, *zip(*asked, strict=True)), strict=True):
            runs[key] = made
            _say(made[0])
    ways = sorted({(where, how) for where, how, _ in runs if how != "alone"})
    summaries = [summary(runs, where, how) for where, how in ways]
    for each in summaries:
        _say(each)
    if arguments.json is not None:
        arguments.json.write_bytes(
            msgspec.json.format(msgspec.json.encode([*(run for run, _ in runs.values()), *summaries]), indent=1) + b"\n"
        )
    return 0


def _say(result: Run | Summary) -> None:
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
