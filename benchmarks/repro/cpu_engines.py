"""Real engines on this machine's CPU, a core for each replica, and a trace sent to them through the gateway.

What fidelity.py, backends.py and real_check.py have in common. The engines compute a tiny model; `make engines` sets
them up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import resource
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import aiohttp
import msgspec

from preble.core.costs.model import CostProfile
from preble.engines import connect
from preble.engines.starting.commands import CPU_BLOCK_SIZE, SGLANG_PAGE_SIZE, Command, commands_for
from preble.engines.starting.launch import LaunchOptions, ReplicaProcess
from preble.lab.bench.client import BenchClient
from preble.lab.bench.gateway import started_gateway
from preble.lab.bench.load import run_load
from preble.lab.bench.warmup import warm_up
from preble.lab.metrics import RequestRecord, Summary, summarize
from preble.lab.profiling import Measurements
from preble.lab.profiling.measure import Measuring
from preble.lab.workloads import Workload
from preble.lab.workloads.arrivals import make_arrivals
from preble.lab.workloads.generators.pieces import Asked
from preble.lab.workloads.generators.shared_prefix import SharedPrefix
from preble.lab.workloads.lengths import Lengths
from preble.profiles import profile_json

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LOGS = ROOT / "build" / "cpu_engines"
MODEL = ROOT / ".engines" / "models" / "tiny-llama"
EngineName = Literal["vllm", "sglang", "emulator"]
ENGINES: tuple[EngineName, ...] = ("vllm", "sglang", "emulator")

REPLICAS = 2
KV_TOKENS = 16_384
MAX_MODEL_LEN, LONGEST = 3072, 3000
"""What an engine takes, and what is measured of it: SGLang keeps some tokens for itself."""

MAX_RUNNING = 16
MAX_BATCH_TOKENS = 1024
"""As both engines are started on a CPU (preble.engines.starting.commands)."""

EMULATED_PROFILE = "tiny-cpu"
BLOCK_SIZES = {"vllm": CPU_BLOCK_SIZE, "sglang": SGLANG_PAGE_SIZE, "emulator": 16}
READY_S = 300.0
DISTURBED, MOST_TRIES = 0.08, 3
"""The share of a core that others may use in a run, and how often it is tried."""

HIGHEST_PRIORITY = -20

CORES = sorted(os.sched_getaffinity(0))
"""Those that we may use. With fewer than replicas (`taskset -c 1 python ...`), replicas share one."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK")

TOOLS = SharedPrefix(
    name="tools",
    noun="tool",
    system_tokens=60,
    shared_tokens=Lengths("gamma", 1000, 350, low=250, high=2000),
    uses=Lengths("lognormal", 12, 8, low=2),
    question_tokens=Lengths("lognormal", 150, 80, low=20, high=500),
    output_tokens=Lengths("normal", 16, 5, low=4),
)
NUM_TOOLS = 20
"""Of some 1,000 tokens each: one replica does not hold them all, two do."""


def trace(requests: int, rps: float, seed: int) -> Workload:
    """Tool use. A core computes 7,000 tokens a second: the engine's time is nearly all of a request's."""
    made = TOOLS(Asked(requests, seed, num_prefixes=NUM_TOOLS))
    return made.with_arrivals(make_arrivals("poisson", requests, rps, random.Random(f"arrivals/{seed}")))


@asynccontextmanager
async def replicas(engine: EngineName, log_dir: Path) -> AsyncIterator[list[ReplicaProcess]]:
    """Start replicas that are ready and have computed something, each on a core of its own if there are enough.

    They and this process get priority over all others on the machine, where that is allowed.
    """
    go_first(os.getpid())
    options = LaunchOptions(
        engine=engine,
        replicas=REPLICAS,
        threads=1,
        log_dir=log_dir,
        model=None if engine == "emulator" else str(MODEL),
        profile=EMULATED_PROFILE,
        kv_tokens=KV_TOKENS,
        max_model_len=None if engine == "emulator" else MAX_MODEL_LEN,
        device="cpu",
        dev_endpoints=True,
        extra_args=_engine_args(engine),
    )
    started = [
        ReplicaProcess(f"{engine}-{i}", _on_core(CORES[i % len(CORES)], command), log_dir / f"{engine}-{i}.log")
        for i, command in enumerate(commands_for(options))
    ]
    async with AsyncExitStack() as stack:
        for replica in started:
            stack.push_async_callback(replica.stop)
        async with asyncio.TaskGroup() as tasks:
            for replica in started:
                tasks.create_task(_up(replica))
        await warm_up([replica.url for replica in started])
        yield started


def _engine_args(engine: EngineName) -> tuple[str, ...]:
    if engine == "emulator":
        return ("--max-running", str(MAX_RUNNING), "--max-model-len", str(MAX_MODEL_LEN))
    return ("--sleep-on-idle",) if engine == "sglang" else ()


def go_first(pid: int) -> bool:
    """Give a process, and those that it starts later, priority over all others on this machine. False if that failed.

    A priority with which this script was started (`nice -n 10 python ...`) stays, for all processes.
    """
    priority = os.getpriority(os.PRIO_PROCESS, 0) or HIGHEST_PRIORITY
    session = Path(f"/proc/{pid}/autogroup")  # Linux shares the processor between sessions first, where it does so
    try:
        os.setpriority(os.PRIO_PROCESS, pid, priority)
        if session.exists():
            session.write_text(str(priority))
    except PermissionError:
        return False
    return priority < 0


def _on_core(core: int, command: Command) -> Command:
    tool = shutil.which("taskset")
    if tool is None:
        raise SystemExit("a replica is kept on its core by taskset, which is not there; install util-linux")
    return dataclasses.replace(command, argv=(tool, "--cpu-list", str(core), *command.argv))


async def _up(replica: ReplicaProcess) -> None:
    await replica.start()
    assert replica.pid is not None, "it has just been started"
    go_first(replica.pid)
    await replica.wait_ready(READY_S)


async def empty_caches(engine: EngineName, urls: Sequence[str]) -> None:
    """Empty all caches. The engine sends the events with its next step."""
    path = "/flush_cache" if engine == "sglang" else "/reset_prefix_cache"
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        for url in urls:
            async with session.post(f"{url}{path}"):
                pass
    await warm_up(urls)


async def measurements(url: str, seed: int, *, quick: bool = False) -> Measurements:
    """Return what `preble profile` measures of this replica."""
    engine = connect(url)
    try:
        measuring = Measuring(
            engine, machine="a CPU core", seed=seed, quick=quick, max_tokens=LONGEST, kv_tokens=KV_TOKENS
        )
        await measuring.prepare()
        return await measuring.run()
    finally:
        await engine.close()


class Measured(msgspec.Struct, frozen=True):
    """One run. `busy`: processor time by time passed, of a replica on average, the gateway, the client, and others.

    `others` is everything else on our cores and time that their host withheld: what disturbed the run, unless
    `went_first`: then the others had only what replicas, gateway and client left them.
    """

    summary: Summary
    busy: dict[str, float]
    went_first: bool = False

    @property
    def disturbed(self) -> float:
        """Return the share of a core that other work took from it."""
        return 0.0 if self.went_first else self.busy["others"]


@asynccontextmanager
async def gateway(
    started: Sequence[ReplicaProcess], policy: str, profile: CostProfile, *, refit: bool
) -> AsyncIterator[ReplicaProcess]:
    """The gateway in front of these replicas. `refit`: whether it corrects the profile while it serves."""
    path = LOGS / "profile.json"
    path.write_text(profile_json(profile), encoding="utf-8")
    args = ["--policy", policy, "--profile", str(path)]
    with patch.dict(os.environ, {"PREBLE_SCHEDULER__REFIT": str(refit).lower()}):
        async with started_gateway([replica.url for replica in started], args, LOGS / "gateway.log") as process:
            assert process.pid is not None, "it has just been started"
            go_first(process.pid)
            yield process


async def measure(
    engine: EngineName,
    started: Sequence[ReplicaProcess],
    policy: str,
    profile: CostProfile,
    workload: Workload,
    *,
    refit: bool,
) -> Measured:
    """One run from empty caches, behind a gateway of its own.

    A run that something else disturbed is made again, at most twice; the least disturbed one counts, however it came
    out otherwise.
    """
    runs: list[Measured] = []
    while not runs or (runs[-1].disturbed > DISTURBED and len(runs) < MOST_TRIES):
        await empty_caches(engine, [replica.url for replica in started])
        async with gateway(started, policy, profile, refit=refit) as front:
            runs.append(await send(started, front, workload))
    return min(runs, key=lambda run: run.disturbed)


async def send(
    started: Sequence[ReplicaProcess], front: ReplicaProcess, workload: Workload, *, skip: int = 0
) -> Measured:
    """Send it to the gateway and wait for the last answer. `skip`: its first requests are not in the summary."""
    records: list[RequestRecord] = []
    went_first = go_first(os.getpid())
    async with BenchClient(front.url) as client:
        await client.find_model()
        before = _times_s(started, front)
        await run_load(client, workload, records.append)
    used = {name: after - before[name] for name, after in _times_s(started, front).items()}
    used["others"] = used.pop("machine") - sum(used[name] for name in ("replicas", "gateway", "client"))
    passed_s = used.pop("clock")
    busy = {name: seconds / passed_s for name, seconds in used.items()}
    skipped = {request.request_id for request in workload.requests[:skip]}
    counted = [record for record in records if record.request_id not in skipped]
    return Measured(summarize(counted), busy | {"replica": busy.pop("replicas") / len(started)}, went_first)


def _times_s(started: Sequence[ReplicaProcess], front: ReplicaProcess) -> dict[str, float]:
    """Processor time used so far, and what the clock says, in seconds."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    ours = tuple(f"cpu{core} " for core in CORES)
    return {
        "clock": time.monotonic(),
        "client": own.ru_utime + own.ru_stime,
        "gateway": _cpu_s([front]),
        "replicas": _cpu_s(started),
        "machine": sum(_busy_s(line) for line in Path("/proc/stat").read_text().splitlines() if line.startswith(ours)),
    }


def _busy_s(line: str) -> float:
    """What a core's line in /proc/stat says of the time that it, or its host, was at work, in seconds."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def _cpu_s(processes: Sequence[ReplicaProcess]) -> float:
    """Processor time that these and all that they started have used so far, in seconds."""
    groups = {process.pid for process in processes}
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if int(fields[2]) in groups:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S


NUMBERS = (("TTFT", "mean"), ("TTFT", "p99"), ("E2E", "mean"), ("E2E", "p99"))
"""What is shown of a run."""


def latency_s(summary: Summary, what: str, number: str) -> float:
    """One of `NUMBERS`, in seconds."""
    times = summary.ttft if what == "TTFT" else summary.e2e
    if times is None:
        raise SystemExit("no request was answered in one of the runs; look into the engine's log")
    return times.mean_s if number == "mean" else times.p99_s
