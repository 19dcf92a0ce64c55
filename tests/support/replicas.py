"""Real replicas for a whole test session: two of vLLM, one of SGLang, and a vLLM that embeds.

The first is plain vLLM, which orders by priority; the second and SGLang order their waiting requests as Preble does and
run two requests at once. `support/questions.py` asks them.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from preble.engines.starting.launch import Fleet, LaunchOptions, ReplicaProcess
from support.servers import not_there

ROOT = Path(__file__).resolve().parents[2]
VLLM = ROOT / ".engines" / "vllm" / "bin" / "vllm"
SGLANG = ROOT / ".engines" / "sglang" / "bin" / "python"
TINY_MODEL = ROOT / ".engines" / "models" / "tiny-llama"
MODEL_NAME = "tiny"
EMBEDDING_MODEL = "tiny-embedding"
"""The same weights, served for embeddings."""

BLOCK_SIZE = 32
"""Of the vLLM replicas."""

PAGE_SIZE = 16
"""Of the SGLang replica."""

KV_TOKENS = 2048
"""Of each replica: so few that a handful of prompts forces evictions."""

MAX_MODEL_LEN = 2048
PLACES = 2
"""Requests that the second replica runs at once."""

EVERYTHING = (
    *("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "pythonic"),
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
)
"""Turns on vLLM's `/inference/v1/generate` and tool calls. Random weights would write white space for ever."""

VLLM_ENVIRON = {"VLLM_ENABLE_RESPONSES_API_STORE": "1", "TORCH_COMPILE_DISABLE": "1"}
"""The pair keeps responses, and compiles nothing: the first request for logprobs would wait minutes for a compiler."""

BY_PRIORITY = ("--scheduling-policy", "priority")
WITH_PREBLE = ("--scheduler-cls", "preble.integrations.vllm_scheduler.PrebleScheduler", "--max-num-seqs", str(PLACES))
READY_TIMEOUT_S = 600.0
TEST_TIMEOUT_S = 1500.0
"""For a test that starts real engines, or starts one again: several times what they take on a busy machine."""

LOG_LINES = 40

T = TypeVar("T")


def require_vllm() -> None:
    """Skip the test where vLLM is not set up; with CI=true that is a failure."""
    require(VLLM, "vllm")


def require_sglang() -> None:
    """Skip the test where SGLang is not set up; with CI=true that is a failure."""
    require(SGLANG, "sglang")


def require(program: Path, engine: str) -> None:
    if program.is_file() and TINY_MODEL.is_dir():
        return
    not_there(f"real {engine} is not set up here: run `make engines` (python3 dev/setup.py {engine})")


def options_of_one(engine: str, executable: Path, log_dir: Path, **others: Any) -> LaunchOptions:
    """One replica of the tiny model. `others`: more options, or other values."""
    options: dict[str, Any] = {
        "engine": engine,
        "replicas": 1,
        "threads": 1,
        "log_dir": log_dir,
        "model": str(TINY_MODEL),
        "served_model_name": MODEL_NAME,
        "kv_tokens": KV_TOKENS,
        "max_model_len": MAX_MODEL_LEN,
        "executable": executable,
        "ready_timeout_s": READY_TIMEOUT_S,
    }
    return LaunchOptions(**(options | others))


@contextmanager
def running_sglang(log_dir: Path) -> Iterator[RunningReplicas]:
    """Start one replica, stop it."""
    options = options_of_one("sglang", SGLANG, log_dir, extra_args=("--max-running-requests", str(PLACES)))
    with mock.patch.dict(os.environ, PREBLE_QUEUE_ORDER="groups"):
        fleet = Fleet(options)
    with running(fleet) as loop:
        yield RunningReplicas(fleet.replicas, loop)


@contextmanager
def running_vllm_embedding(log_dir: Path) -> Iterator[RunningReplicas]:
    """Start one vLLM replica that embeds, stop it."""
    pooling = ("--runner", "pooling")
    options = options_of_one("vllm", VLLM, log_dir, served_model_name=EMBEDDING_MODEL, device="cpu", extra_args=pooling)
    fleet = Fleet(options)
    with running(fleet) as loop:
        yield RunningReplicas(fleet.replicas, loop)


@dataclass(frozen=True, slots=True)
class RunningReplicas:
    """Replicas that run. `urls` stay the same when one is killed and started again."""

    replicas: tuple[ReplicaProcess, ...]
    loop: asyncio.AbstractEventLoop

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(replica.url for replica in self.replicas)

    async def kill(self, index: int) -> None:
        """Kill one replica as a crash would. Start it again before the test ends."""
        await self._there(self.replicas[index].kill())

    async def start(self, index: int) -> None:
        """Start one again that was killed; returns when it is ready."""
        await self._there(self._restarted(self.replicas[index]))

    def revive(self) -> list[str]:
        """Start those that have died by themselves. Returns the ends of their logs."""
        logs = []
        for replica in self.replicas:
            if not replica.is_alive:
                logs.append(f"{replica.name} had died. The end of {replica.log_path}:\n{end_of(replica.log_path)}")
                asyncio.run_coroutine_threadsafe(self._restarted(replica), self.loop).result()
        return logs

    @staticmethod
    async def _restarted(replica: ReplicaProcess) -> None:
        await replica.start()
        await replica.wait_ready(READY_TIMEOUT_S)

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it in the loop that owns the processes: it outlives the loop of any one test."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))


def end_of(log: Path) -> str:
    """Its last lines."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


class VllmPair(RunningReplicas):
    """Two of them."""

    @property
    def urls(self) -> tuple[str, str]:
        first, second = self.replicas
        return first.url, second.url


@contextmanager
def running_vllm_pair(log_dir: Path) -> Iterator[VllmPair]:
    """Start both, stop both."""
    options = options_of_one("vllm", VLLM, log_dir, device="cpu", dev_endpoints=True)
    with mock.patch.dict(os.environ, VLLM_ENVIRON):
        plain = Fleet(replace(options, extra_args=(*BY_PRIORITY, *EVERYTHING)))
        with_preble = Fleet(replace(options, log_dir=log_dir / "with-preble", extra_args=(*WITH_PREBLE, *EVERYTHING)))
    with running(plain, with_preble) as loop:
        yield VllmPair((*plain.replicas, *with_preble.replicas), loop)


@contextmanager
def running(*fleets: Fleet) -> Iterator[asyncio.AbstractEventLoop]:
    """Bring all of them up in a loop of their own, in a thread that ends with them."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="real-engines")
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(bring_up(*fleets), loop).result()
        yield loop
    finally:
        for fleet in fleets:
            asyncio.run_coroutine_threadsafe(fleet.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def bring_up(*fleets: Fleet) -> None:
    """Start them at the same time. If one fails, its error is raised; stop all of them then."""
    async with asyncio.TaskGroup() as tasks:
        for fleet in fleets:
            tasks.create_task(fleet.__aenter__())
