"""What the tests of KV tiers on real engines share: a gateway that loads gladly, and what it expects to find."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from preble.config import ReplicaConfig
from preble.core.costs.model import CostModel
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import make_policy
from preble.engines.kv_events.sockets import KvEventEndpoints
from preble.engines.kv_events.stream import KvEventStream
from preble.gateway.server import Gateway
from preble.profiles import load_profile
from support.belief import newest_message
from support.gateways import gateway_before
from support.replicas import KV_TOKENS, MODEL_NAME
from support.waiting import eventually

WHOLE = 640
"""Tokens of the prompt in whole blocks, of 16 tokens or of 32."""

PROMPT = list(range(1000, 1000 + WHOLE + 5))


def loading_profile(tmp_path: Path) -> Path:
    """Of a replica that loads faster than it computes."""
    profile = tmp_path / "loading.json"
    fast = msgspec.json.decode(msgspec.json.encode(load_profile("tiny-cpu"))) | {
        "host_load_s_per_token": 1e-7,
        "store_load_s_per_token": 2e-7,
    }
    profile.write_bytes(msgspec.json.encode(fast))
    return profile


@asynccontextmanager
async def gateway_to(urls: Sequence[str], profile: Path, store: str = "") -> AsyncIterator[Gateway]:
    """A gateway that knows that loading is faster than computing, and believes answers no longer than events."""
    replicas = [ReplicaConfig(url, kv_store=store) for url in urls]
    scheduler = GlobalScheduler(make_policy("preble"), CostModel(load_profile(str(profile))), report_grace_s=0.0)
    async with gateway_before(replicas, scheduler) as gateway:
        yield gateway


async def cached(url: str, prompt: Sequence[int]) -> tuple[str, int, int]:
    """Ask for one token. The replica, its tokens expected to be cached (-1 without a gateway), and those found."""
    body = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": 1}
    async with aiohttp.ClientSession(url) as http, http.post("/v1/completions", json=body) as answer:
        usage = (await answer.json())["usage"]
        headers = answer.headers
        found = usage["prompt_tokens_details"]["cached_tokens"]
        return headers.get("x-preble-replica", ""), int(headers.get("x-preble-matched-tokens", -1)), found


async def in_step(gateway: Gateway) -> None:
    """Wait until every event that the engines have sent has arrived."""
    for replica in gateway.serving.replicas.values():
        [stream] = replica.engine._streams._streams  # type: ignore[attr-defined]
        [endpoints] = replica.info.kv_events

        async def has_come(stream: KvEventStream = stream, endpoints: KvEventEndpoints = endpoints) -> bool:
            return max(stream.position or 0, 0) == await newest_message(endpoints)

        await eventually(has_come, "every event has arrived")


async def overwrite(url: str) -> None:
    """Fill the engine's own memory with other prompts."""
    for seed in range(4 * KV_TOKENS // 1000):
        await cached(url, random.Random(seed).choices(range(100, 4000), k=1000))


async def check_the_hosts_memory(urls: Sequence[str], tmp_path: Path) -> None:
    """Check that a prompt that only the one replica's host memory still has is expected there, and found."""
    [url] = urls
    async with gateway_to(urls, loading_profile(tmp_path)) as gateway:
        assert (await cached(gateway.url, PROMPT))[2] == 0
        await overwrite(url)
        await in_step(gateway)
        assert (await cached(gateway.url, PROMPT))[1:] == (WHOLE, WHOLE)
