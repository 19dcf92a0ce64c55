"""Copies of a prefix between two real vLLM with the p2p tier, by their own counters, and without their source."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from preble.config import ParityConfig, ReplicaConfig
from preble.engines.commands import free_ports
from preble.engines.launch import Fleet
from preble.gateway.server import Gateway
from support.gateways import gateway_before, idle
from support.linked import linked_profile
from support.own_vllm import SUPPORT, own_vllm
from support.replicas import MODEL_NAME, TEST_TIMEOUT_S
from support.servers import require_server
from support.tiers import PROMPT, WHOLE, in_step
from support.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]

HOST_BYTES = 64 * 1024 * 1024
SHARED_MEMORY = Path("/dev/shm")
P2P = b'prompt_tokens_cached_by_source_total{engine="0",model_name="tiny",source="p2p"}'


@pytest.fixture(autouse=True)
def no_memory_is_left_behind() -> AsyncIterator[None]:
    before = set(SHARED_MEMORY.glob("vllm_offload_*"))
    yield  # type: ignore[misc]
    for left in set(SHARED_MEMORY.glob("vllm_offload_*")) - before:
        left.unlink()


def one_of_a_pair(folder: Path, port: int) -> Fleet:
    """A vLLM whose KV others may copy from this port."""
    folder.mkdir()
    [packages] = (require_server("nixl", "python").parents[1] / "lib").glob("python*/site-packages")
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
    return Fleet(own_vllm(folder, *arguments, path=[SUPPORT / "vllm_host_memory", packages]))


@dataclass(frozen=True)
class Pair:
    """Two vLLM behind a gateway."""

    fleets: tuple[Fleet, Fleet]
    gateway: Gateway

    @property
    def urls(self) -> list[str]:
        return [fleet.urls[0] for fleet in self.fleets]

    async def ask(self, url: str, prompt: list[int] = PROMPT) -> tuple[str, int, str]:
        """The replica, how many tokens it had, and the text."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0}
        async with aiohttp.ClientSession(url) as http, http.post("/v1/completions", json=body) as answer:
            given = await answer.json()
            assert answer.status == 200, given
            cached = given["usage"]["prompt_tokens_details"]["cached_tokens"]
            return answer.headers.get("x-preble-replica", ""), cached, given["choices"][0]["text"]

    async def ask_elsewhere(self, source: str, prompt: list[int]) -> tuple[str, int, str]:
        """Ask when the source takes no new requests, so that the other must copy from it or compute."""
        self.gateway.serving.members.wanted.drain(source)
        self.gateway.serving.members.reconcile()
        try:
            return await self.ask(self.gateway.url, prompt)
        finally:
            self.gateway.serving.members.wanted.undrain(source)
            self.gateway.serving.members.reconcile()

    async def copied(self, url: str) -> float:
        """Prompt tokens that a vLLM says it has copied."""
        async with aiohttp.ClientSession(url) as http, http.get("/metrics") as answer:
            found = re.search(re.escape(P2P) + rb" (\S+)", await answer.read())
        return float(found[1]) if found else 0.0


@asynccontextmanager
async def pair(folder: Path, parity: ParityConfig) -> AsyncIterator[Pair]:
    ports = free_ports(2)
    async with AsyncExitStack() as stack:
        fleets = [one_of_a_pair(folder / name, port) for name, port in zip("ab", ports, strict=True)]
        for fleet in fleets:
            await stack.enter_async_context(fleet)
        replicas = [ReplicaConfig(f.urls[0], kv_peer=f"127.0.0.1:{p}") for f, p in zip(fleets, ports, strict=True)]
        # Nearly every copy pays, and it may take long: the machine is busy.
        profile = linked_profile(folder, s_per_token=0.1, bytes_per_s=1e9, latency_s=10.0)
        given = {"profile": str(profile), "parity": parity}
        gateway = await stack.enter_async_context(gateway_before(replicas, **given))
        yield Pair((fleets[0], fleets[1]), gateway)
        await idle(gateway)


async def test_a_prefix_is_copied_and_then_its_source_is_dead(tmp_path: Path) -> None:
    async with pair(tmp_path, ParityConfig(answer_s=300.0, events_s=300.0)) as two:
        links = two.gateway.serving.scheduler._cluster.links
        await eventually(lambda: links.groups, "a copied prompt was answered as its source does", timeout_s=300.0)
        source, found, text = await two.ask(two.gateway.url)
        assert found == 0
        [target] = set(two.urls) - {source}
        await in_step(two.gateway)
        before = await two.copied(target)
        assert await two.ask_elsewhere(source, PROMPT) == (target, WHOLE, text)
        assert await two.copied(target) - before == WHOLE
        newest = next(one for one in two.gateway.serving.recent.latest(1))
        assert newest.transfer is not None and newest.transferred_s is not None and not newest.transfer_failed

        fleet = next(fleet for fleet in two.fleets if fleet.urls == [source])
        second = [*PROMPT[:320], *range(3000, 3325)]
        _, _, wanted = await two.ask(source, second)
        await in_step(two.gateway)
        [process] = fleet.replicas
        await process.kill()
        before = await two.copied(target)
        replica, found, answered = await two.ask(two.gateway.url, second)
        assert (replica, answered) == (target, wanted)
        assert found in (320, WHOLE), "what was to be copied it computes, with the prefix or with the whole prompt"
        assert await two.copied(target) == before


async def test_a_source_that_dies_during_a_copy_costs_its_request_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path, ParityConfig(enabled=False)) as two:
        source, _, text = await two.ask(two.gateway.url)
        [target] = set(two.urls) - {source}
        await in_step(two.gateway)
        [process] = next(fleet for fleet in two.fleets if fleet.urls == [source]).replicas
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)  # so that the copy is under way until it dies
        asking = asyncio.create_task(two.ask_elsewhere(source, PROMPT))
        copies = two.gateway.serving._placements.copies
        await eventually(lambda: copies.sending().total() == 1, "the copy is under way")
        async with aiohttp.ClientSession(target) as http:
            await eventually(lambda: _runs_one(http), "its target has it")
        await process.kill()
        replica, found, answered = await asking
        assert (replica, answered) == (target, text)
        assert found in (0, WHOLE), "the target computes it with the copy's request, or with the client's"
        newest = next(one for one in two.gateway.serving.recent.latest(1))
        assert newest.transfer is not None and newest.transfer.source == source
        assert await two.copied(target) in (0, WHOLE), "its engine, a process of its own, may have sent it before"


async def _runs_one(http: aiohttp.ClientSession) -> bool:
    """Whether the engine has a request, running or waiting."""
    async with http.get("/metrics") as answer:
        counts = re.findall(rb"vllm:num_requests_(?:running|waiting)\{.*\} (\S+)", await answer.read())
    return sum(map(float, counts)) == 1
