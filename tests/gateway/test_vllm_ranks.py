"""The gateway in front of one real vLLM server of two data-parallel ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from preble.config import GatewayConfig, ReplicaConfig
from preble.engines.launch import Fleet, LaunchOptions
from preble.gateway.server import serving
from support.replicas import MAX_MODEL_LEN, MODEL_NAME, READY_TIMEOUT_S, TEST_TIMEOUT_S, TINY_MODEL, require_vllm
from support.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(TEST_TIMEOUT_S)]

KV_TOKENS = 8192
"""Of each rank."""


async def test_each_rank_is_a_replica_with_its_own_cache_and_events(tmp_path: Path) -> None:
    require_vllm()
    options = LaunchOptions(
        engine="vllm",
        replicas=1,
        log_dir=tmp_path,
        model=str(TINY_MODEL),
        served_model_name=MODEL_NAME,
        max_model_len=MAX_MODEL_LEN,
        kv_tokens=KV_TOKENS,
        threads=1,
        dev_endpoints=True,
        ready_timeout_s=READY_TIMEOUT_S,
        extra_args=("--data-parallel-size", "2", "--api-server-count", "1"),
    )
    async with Fleet(options) as fleet:
        [url] = fleet.urls
        config = GatewayConfig(replicas=(ReplicaConfig(url),), port=0, policy="round_robin")
        async with serving(config) as gateway, aiohttp.ClientSession(gateway.url) as http:
            await eventually(lambda: len(gateway.serving.replicas) == 2, "both ranks have joined")

            async def complete(start: int, **headers: str) -> tuple[int, str, int]:
                """Status, rank and the tokens that it had cached."""
                body = {"model": MODEL_NAME, "prompt": list(range(start, start + 150)), "max_tokens": 2}
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                async with http.post("/v1/completions", json=body, headers=named) as answer:
                    usage = (await answer.json()).get("usage") or {"prompt_tokens_details": {"cached_tokens": 0}}
                    replica = answer.headers.get("x-preble-replica", "")
                    return answer.status, replica, usage["prompt_tokens_details"]["cached_tokens"]

            async def pages() -> list[dict[str, Any]]:
                async with http.get("/debug/replicas") as answer:
                    return list(json.loads(await answer.text())["replicas"])

            first = [await complete(100), await complete(100)]
            assert sorted(first) == [(200, f"{url}#0", 0), (200, f"{url}#1", 0)], "each has a cache of its own"
            assert await complete(100, x_data_parallel_rank="1") == (200, f"{url}#1", 128)
            assert (await complete(500, x_data_parallel_rank="7"))[0] == 400
            assert [page["kv_capacity_tokens"] for page in await pages()] == [KV_TOKENS, KV_TOKENS]

            async def are_verified() -> bool:
                return [page["parity"] for page in await pages()] == ["verified", "verified"]

            await eventually(are_verified, "the events of each rank are those of its own cache")
