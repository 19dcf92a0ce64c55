"""KV blocks of real vLLM in the host's memory and in a folder that two replicas share, from events to placement."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from preble.engines.starting.launch import Fleet
from support.own_vllm import SUPPORT, own_vllm
from support.replicas import TEST_TIMEOUT_S
from support.tiers import PROMPT, WHOLE, cached, check_the_hosts_memory, gateway_to, in_step, loading_profile

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]

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


async def test_what_only_the_hosts_memory_has_is_expected_and_found(tmp_path: Path) -> None:
    path = [SUPPORT / "vllm_host_memory"]
    async with Fleet(own_vllm(tmp_path, *offloading("HostMemorySpec"), path=path)) as fleet:
        await check_the_hosts_memory(fleet.urls, tmp_path)


async def test_what_one_replica_has_stored_the_other_is_expected_to_load(tmp_path: Path) -> None:
    (folder := tmp_path / "shared").mkdir()
    tiers = [{"type": "fs", "root_dir": str(folder), "enable_kv_events": True, "locality": "REMOTE"}]
    extra = offloading("SharedFolderSpec", self_describing_kv_events=True, secondary_tiers=tiers)
    path = [SUPPORT / "vllm_host_memory"]
    async with (
        Fleet(own_vllm(tmp_path, *extra, path=path, replicas=2)) as fleet,
        gateway_to(fleet.urls, loading_profile(tmp_path), STORE) as gateway,
    ):
        first, _, found = await cached(gateway.url, PROMPT)
        assert found == 0
        [other] = set(fleet.urls) - {first}
        await in_step(gateway)
        gateway.serving.members.wanted.drain(first)
        gateway.serving.members.reconcile()
        assert await cached(gateway.url, PROMPT) == (other, WHOLE, WHOLE)
