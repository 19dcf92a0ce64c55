"""Plain questions to one replica, past all of our own code; and requests to it by our client."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import aiohttp

from preble.engines import Engine, connect
from support.replicas import BLOCK_SIZE, MODEL_NAME, PAGE_SIZE
from support.waiting import eventually


def prompt_of(seed: int, length: int) -> list[int]:
    """Token ids that no other seed has; no special tokens among them."""
    chance = random.Random(seed)
    return [chance.randrange(100, 4000) for _ in range(length)]


@asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """For as many requests at once as a test has, however long they take.

    No kept connections: an engine closes those that idle, and a POST on one that it just closed fails.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        yield http


Kind = TypeVar("Kind", bound="Replica")


class Replica(ABC):
    """What tests ask any replica."""

    engine: Literal["vllm", "sglang"]
    block_size: int
    metrics_come_late = False
    """Whether a metric is there only from its first change on."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self._http = http

    async def complete(self, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> int:
        """Run a prompt. Returns the number of its tokens that were cached."""
        usage = await self._usage(prompt, max_tokens=max_tokens, ignore_eos=True, **more)
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    async def generate(self, prompt: Sequence[int] | Sequence[Sequence[int]], num_tokens: int) -> int:
        """Run one prompt, or several that arrive together. Returns the number of tokens that were generated.

        With `min_tokens`, as SGLang admits requests that ignore the end of a text only if all of their output fits.
        """
        usage = await self._usage(prompt, max_tokens=num_tokens, min_tokens=num_tokens)
        return int(usage["completion_tokens"])

    async def _usage(self, prompt: Sequence[Any], **fields: Any) -> dict[str, Any]:
        body = {"model": MODEL_NAME, "prompt": list(prompt), **fields}
        async with self._http.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            usage: dict[str, Any] = (await response.json())["usage"]
            return usage

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric that have these labels."""
        async with self._http.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        samples = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        assert samples or self.metrics_come_late, f"{self.url} has no metric {name}"
        return sum(float(line.rpartition(" ")[2]) for line in samples if all(label in line for label in wanted))

    @abstractmethod
    async def num_running(self) -> int: ...

    @abstractmethod
    async def num_waiting(self) -> int: ...

    @abstractmethod
    async def num_preempted(self) -> int:
        """Requests that lost their place to others, since the start."""

    @abstractmethod
    async def num_generated(self) -> int:
        """Tokens of requests that are over, at least; since the start."""

    @abstractmethod
    async def empties_cache(self) -> bool:
        """Forget what is cached; False, and nothing is done, while anything runs."""

    @abstractmethod
    async def holds_nothing(self) -> bool:
        """Whether no memory is in use, but for what is cached."""

    async def is_empty(self) -> bool:
        """Whether nothing runs, waits or holds memory, once its cache is forgotten."""
        if await self.num_running() + await self.num_waiting():
            return False
        return await self.empties_cache() and await self.holds_nothing()

    async def emptied(self) -> None:
        await eventually(self.is_empty, f"nothing is left in {self.engine}")

    async def idle(self) -> None:
        async def nothing_is_left() -> bool:
            return await self.num_running() + await self.num_waiting() == 0

        await eventually(nothing_is_left, f"{self.engine} is idle")

    async def runs(self, count: int) -> bool:
        return await self.num_running() == count


class VllmReplica(Replica):
    """vLLM, or the emulator, which answers as vLLM does."""

    engine = "vllm"
    block_size = BLOCK_SIZE

    async def num_running(self) -> int:
        return int(await self.metric("vllm:num_requests_running"))

    async def num_waiting(self) -> int:
        return int(await self.metric("vllm:num_requests_waiting"))

    async def num_preempted(self) -> int:
        return int(await self.metric("vllm:num_preemptions_total"))

    async def num_generated(self) -> int:
        return int(await self.metric("vllm:generation_tokens_total"))

    async def empties_cache(self) -> bool:
        async with self._http.post(f"{self.url}/reset_prefix_cache") as response:
            return response.status == 200 and await response.json() == {"success": True}

    async def holds_nothing(self) -> bool:
        return await self.metric("vllm:kv_cache_usage_perc") == 0


class SglangReplica(Replica):
    engine = "sglang"
    block_size = PAGE_SIZE
    metrics_come_late = True

    async def load(self, what: str) -> int:
        async with self._http.get(f"{self.url}/v1/loads") as response:
            return int((await response.json())["loads"][0][what])

    async def num_running(self) -> int:
        return await self.load("num_running_reqs")

    async def num_waiting(self) -> int:
        return await self.load("num_waiting_reqs")

    async def num_preempted(self) -> int:
        return int(await self.metric("sglang:num_retracted_requests_total"))

    async def num_generated(self) -> int:
        return int(await self.metric("sglang:generation_tokens_total"))

    async def empties_cache(self) -> bool:
        async with self._http.post(f"{self.url}/flush_cache") as response:
            return response.status == 200

    async def holds_nothing(self) -> bool:
        return await self.load("num_used_tokens") == 0


@asynccontextmanager
async def asked(kind: type[Kind], url: str) -> AsyncIterator[Kind]:
    """A replica with nothing in it."""
    async with session() as http:
        replica = kind(url, http)
        await replica.emptied()
        await replica.complete(prompt_of(0, 8))  # vLLM announces with its next batch that its cache is empty
        yield replica


@asynccontextmanager
async def client_of(replica: Replica) -> AsyncIterator[Engine]:
    """Our client of it, which has asked it what it is."""
    server = connect(replica.url, replica.engine)
    try:
        yield (await server.probe()).engine
    finally:
        await server.close()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL_NAME, "prompt": "def main():", "ignore_eos": True, **fields}).encode()


async def read(engine: Engine, body: bytes, path: str = "/v1/completions") -> tuple[int, bytes]:
    """Status and body of an answer."""
    async with engine.send(path, body, {}) as response:
        return response.status, b"".join([chunk async for chunk in response.chunks()])
