"""An emulated replica copies from another one what a real vLLM does, and counts and answers it alike."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from preble.emulator import EmulatorConfig, EmulatorServer
from preble.engines.starting.ports import free_ports
from preble.engines.vllm.client import copy_source
from preble.lab.profiling.link import BYTES_COPIED
from support.linked import KV_BYTES, linked_profile
from support.p2p_vllm import p2p_vllm, prompt_tokens, shared_memory
from support.replicas import BLOCK_SIZE, KV_TOKENS, MODEL_NAME, TEST_TIMEOUT_S
from support.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(TEST_TIMEOUT_S)]

WHOLE = 20 * BLOCK_SIZE
KV_BYTES_OF_TINY = 2048
"""Of a token's KV in the real model."""
_BYTES_KEPT = re.compile(rb'^vllm:kv_offload_tiering_write_bytes_total\{.*tier="1:p2p".*\} (\S+)', re.MULTILINE)
"""What a vLLM has put into its host's memory, and what it has sent from there."""


WHOLE_BLOCKS = "whole blocks and no more"
"""The known difference: vLLM takes all of them and does not count the token that it computes again. The emulator
computes the last block, as both do where a prompt is cached on the replica itself."""


@dataclass(frozen=True)
class Step:
    """A prompt that the target is asked for, after the source and the target have computed so much of it."""

    name: str
    num_tokens: int
    at_source: int
    at_target: int = 0
    choices: int = 1
    is_gone: bool = False


STEPS = (
    Step("all that the source has", WHOLE + 5, WHOLE + 5),
    Step("the half of it", WHOLE + 5, WHOLE // 2),
    Step("what the target lacks", WHOLE + 5, WHOLE + 5, at_target=WHOLE // 2),
    Step("what a shorter prompt has left", WHOLE + 5, WHOLE // 2 + 5),
    Step("what a longer prompt has left", WHOLE // 2 + 5, WHOLE + 5),
    Step("less than a block", BLOCK_SIZE - 12, BLOCK_SIZE - 12),
    Step("what the source lacks", WHOLE + 5, 0),
    Step("for two answers", WHOLE + 5, WHOLE + 5, choices=2),
    Step(WHOLE_BLOCKS, WHOLE, WHOLE),
    Step("what a source has that is gone", WHOLE + 5, WHOLE + 5, is_gone=True),
)


@dataclass(frozen=True)
class Seen:
    """What the target answered and counted. `fields`: of the answer. `copied`: also from its bytes, in tokens."""

    fields: frozenset[str]
    cached: int
    computed: float
    copied: tuple[float, float]


@dataclass(frozen=True)
class Copying:
    """Two replicas, of which the second copies from the first, which has its tier at `peer`."""

    source: str
    target: str
    peer: str
    kv_bytes: int
    keeps_late: bool

    async def ask(self, url: str, prompt: list[int], **more: Any) -> dict[str, Any]:
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, **more}
        async with aiohttp.ClientSession(url) as http, http.post("/v1/completions", json=body) as answer:
            given = await answer.json()
            assert answer.status == 200, given
            return given

    async def take(self, step: Step, rng: Random) -> Seen:
        """Take one step with prompts that nobody has seen before."""
        drawn = rng.choices(range(100, 4000), k=max(step.num_tokens, step.at_source))
        prompt = drawn[: step.num_tokens]
        kept = await self._kept()
        if step.at_source:
            await self.ask(self.source, drawn[: step.at_source])
            kept += step.at_source // BLOCK_SIZE * BLOCK_SIZE * self.kv_bytes
            await eventually(partial(self._has_kept, kept), "the source has put it where others may copy it")
        if step.at_target:
            await self.ask(self.target, prompt[: step.at_target])
        peer = f"127.0.0.1:{free_ports(1)[0]}" if step.is_gone else self.peer
        before, bytes_before = await prompt_tokens(self.target), await self._bytes()
        given = await self.ask(self.target, prompt, kv_transfer_params=copy_source(peer), n=step.choices)
        kept += ((await prompt_tokens(self.target)).copied - before.copied) * self.kv_bytes
        await eventually(partial(self._has_kept, kept), "it has counted what it sent, before the next step")
        after, bytes_after = await prompt_tokens(self.target), await self._bytes()
        return Seen(
            frozenset(name for name, value in given.items() if value is not None),
            given["usage"]["prompt_tokens_details"]["cached_tokens"],
            after.computed - before.computed,
            (after.copied - before.copied, (bytes_after - bytes_before) / self.kv_bytes),
        )

    async def _bytes(self) -> float:
        return await _counted(self.target, BYTES_COPIED)

    async def _kept(self) -> float:
        return await _counted(self.source, _BYTES_KEPT)

    async def _has_kept(self, num_bytes: float) -> bool:
        """Emulated replicas do at once what others copy, and count no bytes."""
        return not self.keeps_late or await self._kept() >= num_bytes


async def _counted(url: str, pattern: re.Pattern[bytes]) -> float:
    async with aiohttp.ClientSession(url) as http, http.get("/metrics") as answer:
        return sum(map(float, pattern.findall(await answer.read())))


@asynccontextmanager
async def real(folder: Path) -> AsyncIterator[Copying]:
    ports = free_ports(2)
    with shared_memory():
        async with AsyncExitStack() as stack:
            fleets = [p2p_vllm(folder / str(port), port) for port in ports]
            await asyncio.gather(*(stack.enter_async_context(fleet) for fleet in fleets))
            [source], [target] = (fleet.urls for fleet in fleets)
            yield Copying(source, target, f"127.0.0.1:{ports[0]}", KV_BYTES_OF_TINY, keeps_late=True)


@asynccontextmanager
async def emulated(folder: Path) -> AsyncIterator[Copying]:
    profile = linked_profile(folder, s_per_token=1e-6, bytes_per_s=1e9, latency_s=1e-3)
    config = EmulatorConfig(
        profile=str(profile), model=MODEL_NAME, kv_tokens=KV_TOKENS, block_size=BLOCK_SIZE, p2p=True
    )
    async with AsyncExitStack() as stack:
        source, target = [await stack.enter_async_context(EmulatorServer(config)) for _ in range(2)]
        yield Copying(source.url, target.url, source.url.removeprefix("http://"), KV_BYTES, keeps_late=False)


async def steps_of(pair: Copying) -> dict[str, Seen]:
    rng = Random(26)
    return {step.name: await pair.take(step, rng) for step in STEPS}


async def test_an_emulated_copy_is_answered_and_counted_as_a_real_one(tmp_path: Path) -> None:
    async with emulated(tmp_path) as pair:
        ours = await steps_of(pair)
    assert {seen.copied[0] for seen in ours.values()} == {0, WHOLE // 2, WHOLE}, "what this is about has happened"
    async with real(tmp_path) as pair:
        theirs = await steps_of(pair)
    assert {name for name, seen in ours.items() if seen != theirs[name]} == {WHOLE_BLOCKS}
    assert (ours[WHOLE_BLOCKS].cached, ours[WHOLE_BLOCKS].computed) == (WHOLE - BLOCK_SIZE, BLOCK_SIZE)
    assert (theirs[WHOLE_BLOCKS].cached, theirs[WHOLE_BLOCKS].computed) == (WHOLE, 0)
