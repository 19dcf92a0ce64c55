"""KV blocks of real SGLang in the host's memory (HiCache), from events to placement."""

from __future__ import annotations

from pathlib import Path

import pytest

from preble.engines.starting.launch import Fleet
from support.own_sglang import own_sglang
from support.replicas import TEST_TIMEOUT_S
from support.tiers import check_the_hosts_memory

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]

HOST_MEMORY = (
    *("--enable-hierarchical-cache", "--hicache-size", "1", "--hicache-write-policy", "write_through"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"),
)


async def test_what_only_the_hosts_memory_has_is_expected_and_found(tmp_path: Path) -> None:
    async with Fleet(own_sglang(tmp_path, *HOST_MEMORY)) as fleet:
        await check_the_hosts_memory(fleet.urls, tmp_path)
