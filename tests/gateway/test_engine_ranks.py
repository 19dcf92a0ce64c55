"""The gateway in front of one real server of two data-parallel ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from preble.config import ParityConfig, ReplicaConfig
from preble.engines.starting.launch import Fleet, LaunchOptions
from support.gateways import gateway_before
from support.own_sglang import own_sglang
from support.own_vllm import own_vllm
from support.replicas import KV_TOKENS, MODEL_NAME, TEST_TIMEOUT_S
from support.waiting import eventually

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)


@pytest.mark.vllm
async def test_each_rank_of_vllm_is_a_replica_with_its_own_cache_and_events(tmp_path: Path) -> None:
    await check_two_ranks(own_vllm(tmp_path, "--data-parallel-size", "2", "--api-server-count", "1"), 128)


@pytest.mark.sglang
@pytest.mark.slow
async def test_each_rank_of_sglang_is_a_replica_with_its_own_cache_events_and_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # else it wants a NUMA node for each rank
    await check_two_ranks(own_sglang(tmp_path, "--dp-size", "2"), 144, reports_load=True)


async def check_two_ranks(options: LaunchOptions, in_whole_blocks: int, *, reports_load: bool = False) -> None:
    """`in_whole_blocks`: of a prompt of 150 tokens."""
    async with Fleet(options) as fleet:
        [url] = fleet.urls
        settings = {"policy": "round_robin", "parity": ParityConfig()}
        async with (
            gateway_before([ReplicaConfig(url)], joined=2, **settings) as gateway,
            aiohttp.ClientSession(gateway.url) as http,
        ):

            async def complete(start: int, **headers: str) -> tuple[int, str, int]:
                """Status, rank and the tokens that it had cached."""
                body = {"model": MODEL_NAME, "prompt": list(range(start, start + 150)), "max_tokens": 2}
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                async with http.post("/v1/completions", json=body, headers=named) as answer:
                    details = ((await answer.json()).get("usage") or {}).get("prompt_tokens_details") or {}
                    replica = answer.headers.get("x-preble-replica", "")
                    return answer.status, replica, details.get("cached_tokens", 0)

            async def pages() -> list[dict[str, Any]]:
                async with http.get("/debug/replicas") as answer:
                    return list(json.loads(await answer.text())["replicas"])

            first = [await complete(100), await complete(100)]
            assert sorted(first) == [(200, f"{url}#0", 0), (200, f"{url}#1", 0)], "each has a cache of its own"
            assert await complete(100, x_data_parallel_rank="1") == (200, f"{url}#1", in_whole_blocks)
            assert (await complete(500, x_data_parallel_rank="7"))[0] == 400
            assert [page["kv_capacity_tokens"] for page in await pages()] == [KV_TOKENS, KV_TOKENS]

            async def are_verified() -> bool:
                return [page["parity"] for page in await pages()] == ["verified", "verified"]

            async def tell_their_loads() -> bool:
                return all(page["engine_load"] for page in await pages())

            if reports_load:
                await eventually(tell_their_loads, "each rank publishes its load")
            await eventually(are_verified, "the events of each rank are those of its own cache")
