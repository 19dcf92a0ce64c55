"""KV blocks of real vLLM in the host's memory and in a folder that two replicas share, from events to placement."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from preble.config import GatewayConfig, ParityConfig, ReplicaConfig
from preble.core.costs.model import CostModel
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import make_policy
from preble.engines.kv_events import KvEventStream
from preble.engines.kv_sockets import KvEventEndpoints
from preble.engines.launch import Fleet
from preble.gateway.server import Gateway, serving
from preble.profiles import load_profile
from support.belief import newest_message
from support.own_vllm import SUPPORT, own_vllm
from support.replicas import BLOCK_SIZE, KV_TOKENS, MODEL_NAME, TEST_TIMEOUT_S
from support.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]

PROMPT = list(range(1000, 1000 + 20 * BLOCK_SIZE + 5))
WHOLE = 20 * BLOCK_SIZE
HOST_BYTES = 512 * 1024 * 1024
STORE = "folder"
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(autouse=True)
def no_memory_is_left_behind() -> Iterator[None]:
    """vLLM's tiers share memory by a file that no process removes when it is killed: half a gigabyte each."""
    before = set(SHARED_MEMORY.glob("vllm_offload_*"))
    yield
    for left in set(SHARED_MEMORY.glob("vllm_offload_*")) - before:
        left.unlink()


def offloading(spec: str, **more: object) -> tuple[str, str]:
    """Arguments of a vLLM that copies what it computes."""
    extra = {"spec_name": spec, "spec_module_path": "host_memory", "cpu_bytes_to_use": HOST_BYTES, **more}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return ("--kv-transfer-config", json.dumps(transfer))


@asynccontextmanager
async def gateway_to(urls: Sequence[str], tmp_path: Path, store: str = "") -> AsyncIterator[Gateway]:
    """A gateway that knows that loading is faster than computing, and believes answers no longer than events."""
    profile = tmp_path / "loading.json"
    fast = msgspec.json.decode(msgspec.json.encode(load_profile("tiny-cpu"))) | {
        "host_load_s_per_token": 1e-7,
        "store_load_s_per_token": 2e-7,
    }
    profile.write_bytes(msgspec.json.encode(fast))
    config = GatewayConfig(
        replicas=tuple(ReplicaConfig(url, kv_store=store) for url in urls),
        port=0,
        parity=ParityConfig(enabled=False),
    )
    scheduler = GlobalScheduler(make_policy("preble"), CostModel(load_profile(str(profile))), report_grace_s=0.0)
    async with serving(config, scheduler) as gateway:
        await eventually(lambda: len(gateway.serving.replicas) == len(urls), "they have joined")
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


async def test_what_only_the_hosts_memory_has_is_expected_and_found(tmp_path: Path) -> None:
    path = [SUPPORT / "vllm_host_memory"]
    async with Fleet(own_vllm(tmp_path, *offloading("HostMemorySpec"), path=path)) as fleet:
        [url] = fleet.urls
        async with gateway_to(fleet.urls, tmp_path) as gateway:
            assert (await cached(gateway.url, PROMPT))[2] == 0
            await overwrite(url)
            await in_step(gateway)
            assert (await cached(gateway.url, PROMPT))[1:] == (WHOLE, WHOLE)


async def test_what_one_replica_has_stored_the_other_is_expected_to_load(tmp_path: Path) -> None:
    (folder := tmp_path / "shared").mkdir()
    tiers = [{"type": "fs", "root_dir": str(folder), "enable_kv_events": True, "locality": "REMOTE"}]
    extra = offloading("SharedFolderSpec", self_describing_kv_events=True, secondary_tiers=tiers)
    path = [SUPPORT / "vllm_host_memory"]
    async with (
        Fleet(own_vllm(tmp_path, *extra, path=path, replicas=2)) as fleet,
        gateway_to(fleet.urls, tmp_path, STORE) as gateway,
    ):
        first, _, found = await cached(gateway.url, PROMPT)
        assert found == 0
        [other] = set(fleet.urls) - {first}
        await in_step(gateway)
        gateway.serving.members.wanted.drain(first)
        gateway.serving.members.reconcile()
        assert await cached(gateway.url, PROMPT) == (other, WHOLE, WHOLE)
