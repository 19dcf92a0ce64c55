"""The gateway in front of emulated replicas, end to end: prefixes followed, a replica killed under load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from preble.config import HealthConfig, ReplicaConfig
from preble.core.costs.model import CostModel
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import make_policy
from preble.core.types import CacheCleared, ReplicaId, Request
from preble.engines.starting.launch import Fleet, LaunchOptions
from preble.gateway.server import Gateway
from preble.profiles import load_profile
from support.gateways import gateway_before, idle
from support.waiting import eventually

BLOCK = 16
HEALTH = HealthConfig(check_interval_s=0.2, retry_min_s=0.05, retry_max_s=0.2)
REPORTS_TAKE_LONG = 60.0
"""Seconds for which a prompt counts as held before it is reported: more than a busy machine needs to report it."""


@dataclass
class Cluster:
    """A gateway before emulated replicas, each a process of its own."""

    fleet: Fleet
    gateway: Gateway
    scheduler: GlobalScheduler
    http: aiohttp.ClientSession

    async def complete(self, prompt: list[int], max_tokens: int = 4) -> dict[str, str]:
        """The headers of an answer that is well."""
        body = {"prompt": prompt, "max_tokens": max_tokens}
        async with self.http.post("/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
            return {name.lower(): value for name, value in answer.headers.items()}

    async def metrics(self) -> str:
        async with self.http.get("/metrics") as answer:
            return await answer.text()

    async def has_reported(self, num_prompts: int) -> bool:
        """Whether the replicas have reported that many prompts as cached."""
        lines = (await self.metrics()).splitlines()
        stored = [line for line in lines if line.startswith('preble_kv_events_total{kind="BlocksStored"')]
        return sum(float(line.split()[1]) for line in stored) == num_prompts

    def matched(self, replica: str, prompt: list[int]) -> int:
        return self.scheduler.matched_tokens(ReplicaId(replica), Request.of("probe", prompt))

    async def idle(self) -> None:
        """Wait until nothing is in flight, and have the scheduler check itself."""
        await idle(self.gateway)
        assert self.scheduler.snapshot().num_in_flight == 0


@asynccontextmanager
async def cluster(
    replicas: int, log_dir: Path, policy: str = "e2", report_grace_s: float = 1.0
) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        launch = LaunchOptions(engine="emulator", replicas=replicas, log_dir=log_dir)
        fleet = await stack.enter_async_context(Fleet(launch))
        model = CostModel(load_profile("tiny-cpu"))
        scheduler = GlobalScheduler(make_policy(policy), model, report_grace_s=report_grace_s)
        members = list(map(ReplicaConfig, fleet.urls))
        gateway = await stack.enter_async_context(gateway_before(members, scheduler, health=HEALTH))
        http = await stack.enter_async_context(aiohttp.ClientSession(gateway.url))
        yield Cluster(fleet, gateway, scheduler, http)


def prompt_of(number: int, length: int = 20 * BLOCK) -> list[int]:
    """Token ids that no other number has."""
    return list(range(1000 * number, 1000 * number + length))


async def test_prompts_go_where_their_prefix_is_and_events_agree_with_usage(tmp_path: Path) -> None:
    async with cluster(2, tmp_path, report_grace_s=REPORTS_TAKE_LONG) as running:
        homes = [(await running.complete(prompt_of(i)))["x-preble-replica"] for i in range(4)]
        await eventually(partial(running.has_reported, len(homes)))
        for i, home in enumerate(homes):
            headers = await running.complete([*prompt_of(i), 7, 8, 9])
            assert (headers["x-preble-replica"], headers["x-preble-reason"]) == (home, "exploit")
            assert int(headers["x-preble-matched-tokens"]) == 20 * BLOCK
        await running.idle()
        drifts = [running.scheduler.snapshot().replicas[ReplicaId(url)].drift for url in running.fleet.urls]
        assert sum(drift.num_requests for drift in drifts) == 8
        assert sum(drift.predicted_tokens for drift in drifts) == sum(drift.reported_tokens for drift in drifts)


async def test_events_that_build_on_what_is_unknown_have_the_stream_start_over(tmp_path: Path) -> None:
    async with cluster(1, tmp_path) as running:
        [url] = running.fleet.urls

        async def both_are_reported() -> bool:
            return f'preble_kv_events_total{{kind="BlocksStored",replica="{url}"}} 2.0' in await running.metrics()

        await running.complete(prompt_of(1))
        await running.complete(prompt_of(2))
        await eventually(both_are_reported)
        await running.idle()
        running.scheduler.on_evicted(CacheCleared(ReplicaId(url)), asyncio.get_running_loop().time())
        assert running.matched(url, prompt_of(2)) == 0
        # Not through the gateway, which could locate it by the prompt that it has just sent there.
        body = {"prompt": [*prompt_of(1), *range(4 * BLOCK)], "max_tokens": 4}
        async with aiohttp.ClientSession() as direct, direct.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200
        await eventually(lambda: running.matched(url, prompt_of(2)) >= 19 * BLOCK)
        metrics = await running.metrics()
        assert f'preble_kv_resyncs_total{{replica="{url}"}} 1.0' in metrics, metrics
        assert f'preble_kv_blocks_unlocated_total{{replica="{url}"}}' in metrics


async def test_what_was_cached_before_the_gateway_listened_is_learned_from_answers(tmp_path: Path) -> None:
    async with cluster(1, tmp_path, report_grace_s=0.0) as running:
        [url] = running.fleet.urls
        await running.complete(prompt_of(1))
        await eventually(lambda: running.matched(url, prompt_of(1)) >= 19 * BLOCK)
        await running.idle()
        # As after a restart beside an engine that no longer replays the events of that prompt.
        running.scheduler.on_evicted(CacheCleared(ReplicaId(url)), asyncio.get_running_loop().time())
        first = await running.complete([*prompt_of(1), *range(7)])
        again = await running.complete([*prompt_of(1), *range(9, 16)])
        matched = [int(headers["x-preble-matched-tokens"]) for headers in (first, again)]
        assert matched == [0, 20 * BLOCK]


@dataclass(frozen=True)
class Ended:
    """How one request ended. `error`: of the answer or the stream, None if it is whole."""

    streamed: bool
    status: int
    replica: str | None
    error: str | None


async def ask(running: Cluster, number: int) -> Ended:
    """Every second one streamed. Prompts share one of five prefixes."""
    stream = number % 2 == 0
    body = {"prompt": [*prompt_of(number % 5), number], "max_tokens": 40, "stream": stream}
    async with running.http.post("/v1/completions", json=body) as answer:
        raw = await answer.read()
        replica = answer.headers.get("x-preble-replica")
        if not stream or answer.status != 200:
            return Ended(stream, answer.status, replica, json.loads(raw).get("error", {}).get("code"))
        events = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line]
        if events[-1] == b"[DONE]":
            return Ended(stream, 200, replica, None)
        return Ended(stream, 200, replica, json.loads(events[-1])["error"]["code"])


async def asks_until(enough: asyncio.Event, running: Cluster, number: int) -> list[Ended]:
    """One request after the other, so that there is load for as long as it is wanted."""
    ended = [await ask(running, number)]
    while not enough.is_set():
        ended.append(await ask(running, number))
    return ended


@pytest.mark.parametrize("policy", ["e2", "round_robin"])
async def test_a_replica_killed_under_load_loses_only_streams_that_had_begun_there(tmp_path: Path, policy: str) -> None:
    async with cluster(3, tmp_path, policy) as running:
        killed = asyncio.Event()
        clients = [asyncio.create_task(asks_until(killed, running, i)) for i in range(60)]
        victim = running.fleet.replicas[1]
        url = victim.url
        state = running.scheduler.snapshot
        await eventually(lambda: all(one.num_requests > 2 for one in state().replicas.values()))
        await victim.kill()
        killed.set()
        ended = [end for ends in await asyncio.gather(*clients) for end in ends]
        lost = [end for end in ended if end.error is not None]
        assert all(end.streamed and end.replica == url and end.error == "engine_gone" for end in lost)
        assert all(end.status == 200 for end in ended)
        await eventually(lambda: len(running.gateway.serving.replicas) == 2)
        await running.idle()
        assert (await running.complete(prompt_of(9)))["x-preble-replica"] != url
