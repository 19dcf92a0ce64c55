"""A fleet with the load of a busy day and no engines: real placements of made-up requests, for pages that show them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from preble.config import HealthConfig, ReplicaConfig
from preble.core.types import PackedTokens, ReplicaSpec, Request, RequestId, pack_tokens
from preble.core.types.life import FirstToken, Progress
from preble.engines import Engine
from preble.engines.adapter import EngineInfo
from preble.gateway.server import Gateway
from preble.serving.terms import Terms
from support.gateways import gateway_before

MODEL = "qwen3-32b"
KV_TOKENS = 400_000
SPECS: dict[str, dict[str, Any]] = {}
"""What single replicas say of themselves besides, by their id."""


class DrawnEngine(Engine):
    """A replica that is always well and gets no request over HTTP."""

    async def probe(self) -> EngineInfo:
        spec = ReplicaSpec(self.replica_id, kv_capacity_tokens=KV_TOKENS, max_prompt_tokens=131_072)
        spec = replace(spec, **SPECS.get(str(self.replica_id), {}))
        return EngineInfo("drawn", (MODEL,), spec, max_model_len=131_072)

    async def check_ready(self) -> None:
        return


def run_of(name: str, count: int) -> PackedTokens:
    """Tokens that begin with no other run's."""
    numbers = random.Random(name)
    return pack_tokens(numbers.randrange(100_000) for _ in range(count))


class Day:
    """Prompts of agents with tools, of questions about long documents, and of chats, all of one seed."""

    def __init__(self) -> None:
        self._random = random.Random(7)
        self.number = 0

    def prompt(self) -> PackedTokens:
        pick = self._random.random()
        if pick < 0.55:
            tools = run_of("tools", 6_200)
            task = self._random.choices(("search", "code", "sql", "mail"), (6, 4, 2, 1))[0]
            middle = run_of(f"tools {task}", {"search": 900, "code": 2_400, "sql": 1_500, "mail": 700}[task])
            return PackedTokens(tools + middle + self._own(100, 900))
        if pick < 0.8:
            document = self._random.choices(range(9), (9, 7, 5, 3, 2, 2, 1, 1, 1))[0]
            return PackedTokens(run_of(f"document {document}", 9_000 + 3_100 * document) + self._own(40, 200))
        return PackedTokens(run_of("chat", 340) + self._own(60, 2_500))

    def _own(self, least: int, most: int) -> PackedTokens:
        self.number += 1
        return run_of(f"own {self.number}", self._random.randint(least, most))


@asynccontextmanager
async def drawn_fleet(count: int, **changes: Any) -> AsyncIterator[Gateway]:
    """A gateway before `count` such replicas, gpu-1 and so on."""
    width = len(str(count))
    urls = (f"http://gpu-{number:0{width}}:8000" for number in range(1, count + 1))
    replicas = [ReplicaConfig(url, engine=f"{__name__}:DrawnEngine") for url in urls]
    async with gateway_before(replicas, health=HealthConfig(check_interval_s=60.0), **changes) as gateway:
        yield gateway


async def work(gateway: Gateway, day: Day, requests: int, *, at_once: int = 24) -> None:
    """Place this many requests, and answer each after a while."""
    turns, dispatcher = asyncio.Semaphore(at_once), gateway.serving._dispatcher
    loop, numbers, gap = asyncio.get_running_loop(), random.Random(3), gateway.serving.telemetry.gaps(MODEL)

    async def one() -> None:
        async with turns:
            prompt = day.prompt()
            request_id = RequestId(f"7c3e{day.number:05x}")
            arrived_at = loop.time()
            request = Request(request_id, prompt, 400)
            placed = dispatcher.place(request, Terms(request_id, model=MODEL, arrived_at=arrived_at))
            missed = placed.placement.num_prompt_tokens - placed.placement.matched_tokens
            await asyncio.sleep(0.02 + missed / 60_000 * numbers.uniform(0.8, 1.6))
            placed.report(FirstToken())
            await asyncio.sleep(numbers.uniform(0.05, 0.6))
            for _ in range(40):
                gap(numbers.lognormvariate(-3.7, 0.3))
            placed.report(Progress(numbers.randint(40, 400), placed.placement.matched_tokens))
            placed.end()

    await asyncio.gather(*(one() for _ in range(requests)))
