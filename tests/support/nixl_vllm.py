"""Real vLLM replicas with NIXL: one computes a prompt, another one fetches its KV and decodes. What they count."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import aiohttp

from preble.engines.starting.launch import Fleet
from support.own_vllm import own_vllm
from support.servers import nixl_packages

LEASE_S = 6
"""How long a replica keeps what another one is to fetch. As vLLM comes it is 30."""


def nixl_vllm(folder: Path, port: int, **changes: Any) -> Fleet:
    """A vLLM whose KV others may fetch from this port. Its files are in `folder`, a new one."""
    folder.mkdir(parents=True)
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }
    environ = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "UCX_TLS": "tcp,self,sm",
        "TORCH_COMPILE_DISABLE": "1",
    }
    arguments = ("--kv-transfer-config", json.dumps(transfer))
    return Fleet(own_vllm(folder, *arguments, path=[nixl_packages()], environ=environ, **changes))


_COUNTERS = {
    "computed": r'prompt_tokens_by_source_total\{.*source="local_compute".*\}',
    "found": r'prompt_tokens_by_source_total\{.*source="local_cache_hit".*\}',
    "fetched": r'prompt_tokens_by_source_total\{.*source="external_kv_transfer".*\}',
    "num_bytes": r"nixl_bytes_transferred_sum\{.*\}",
}
_USAGE = re.compile(rb"^vllm:kv_cache_usage_perc\{.*\} (\S+)", re.MULTILINE)
_REQUESTS = re.compile(rb"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Counted:
    """Prompt tokens that a vLLM has computed, found in its cache and fetched, and the bytes of these."""

    computed: float
    found: float
    fetched: float
    num_bytes: float

    def since(self, before: Counted) -> Counted:
        return Counted(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


async def counted(url: str) -> Counted:
    """Return what it has counted since it started."""
    page = (await _metrics(url)).decode()
    return Counted(
        **{
            name: sum(map(float, re.findall(rf"^vllm:{pattern} (\S+)", page, re.MULTILINE)))
            for name, pattern in _COUNTERS.items()
        }
    )


async def in_use(url: str) -> float:
    """Return the share of its KV blocks that it cannot evict: of requests, or kept for others to fetch."""
    return sum(map(float, _USAGE.findall(await _metrics(url))))


async def num_requests(url: str) -> float:
    """Return how many requests run or wait there."""
    return sum(map(float, _REQUESTS.findall(await _metrics(url))))


async def _metrics(url: str) -> bytes:
    async with aiohttp.ClientSession(url) as http, http.get("/metrics") as answer:
        return await answer.read()
