"""Real vLLM replicas with the p2p tier, from which others may copy KV, and what they count."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from preble.engines.starting.launch import Fleet
from support.own_vllm import SUPPORT, own_vllm
from support.servers import nixl_packages

HOST_BYTES = 64 * 1024 * 1024
_SHARED_MEMORY = Path("/dev/shm")
_COPIED = re.compile(rb'vllm:prompt_tokens_cached_by_source_total\{.*source="p2p"\} (\S+)')
_COMPUTED = re.compile(rb'vllm:prompt_tokens_by_source_total\{.*source="local_compute"\} (\S+)')
_REQUESTS = re.compile(rb"vllm:num_requests_(?:running|waiting)\{.*\} (\S+)")
_PINNED = re.compile(rb"vllm:kv_offload_tiering_(?:primary_\w+_usage_perc|active_\w+_jobs)\{.*\} (\S+)")


@dataclass(frozen=True)
class PromptTokens:
    """What a vLLM has counted since it started."""

    computed: float
    copied: float


def p2p_vllm(folder: Path, port: int, **changes: Any) -> Fleet:
    """A vLLM whose KV others may copy from this port. Its files are in `folder`, a new one."""
    folder.mkdir(parents=True)
    extra = {
        "spec_name": "SharedFolderSpec",
        "spec_module_path": "host_memory",
        "cpu_bytes_to_use": HOST_BYTES,
        "self_describing_kv_events": True,
        "secondary_tiers": [{"type": "p2p", "host": "127.0.0.1", "port": port, "backends": ["UCX"]}],
    }
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    arguments = ("--kv-transfer-config", json.dumps(transfer))
    return Fleet(own_vllm(folder, *arguments, path=[SUPPORT / "vllm_host_memory", nixl_packages()], **changes))


@contextmanager
def shared_memory() -> Iterator[None]:
    """Remove at the end what such replicas, when they were killed, have left in the shared memory."""
    before = set(_SHARED_MEMORY.glob("vllm_offload_*"))
    yield
    for left in set(_SHARED_MEMORY.glob("vllm_offload_*")) - before:
        left.unlink()


async def prompt_tokens(url: str) -> PromptTokens:
    """Prompt tokens that a vLLM says it has computed, and those it has copied from others."""
    return PromptTokens(*map(sum, await _samples(url, _COMPUTED, _COPIED)))


async def num_requests(url: str) -> float:
    """Requests that run or wait there."""
    [numbers] = await _samples(url, _REQUESTS)
    return sum(numbers)


async def num_under_way(url: str) -> float:
    """Requests that run or wait there, and what its tiers keep for copies."""
    return sum(map(sum, await _samples(url, _REQUESTS, _PINNED)))


async def _samples(url: str, *patterns: re.Pattern[bytes]) -> Sequence[list[float]]:
    async with aiohttp.ClientSession(url) as http, http.get("/metrics") as answer:
        text = await answer.read()
    return [[float(number) for number in pattern.findall(text)] for pattern in patterns]
