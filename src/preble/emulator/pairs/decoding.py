"""The side of a pair that decodes what another replica has prefilled; `rooms` has the other side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from zlib import crc32

import msgspec

from preble.core.replica.prefix_cache import hash_blocks
from preble.core.types import ReplicaId
from preble.emulator.answers.protocol import PairedBody
from preble.emulator.engine import EmulatedEngine
from preble.emulator.generation import Generation, Prompt
from preble.emulator.kv.p2p_tier import num_cached_blocks
from preble.emulator.pairs.rooms import (
    NO_TRANSFER,
    ROOMS_PATH,
    WAITS_S,
    Address,
    PairFailed,
    Sent,
    Wanted,
    addresses,
    failed,
)
from preble.engines.http import HttpClient, HttpTimeouts
from preble.errors import EngineError

UNREACHABLE_S = 14.0
"""After which a request fails whose prefilling replica cannot be reached, as seen."""
LOST_S = 6.0
"""After which a request fails whose prefilling replica has ended, as seen: two heartbeats."""
LEAST_UNREACHABLE_S = 3.0
"""The same of an emulator that runs faster: a busy machine answers no sooner for that."""
RETRY_S = 1.0


class SharedRoom(Exception):
    """Several answers were to be decoded in one room: the engine ends."""


class Decode:
    """Decodes what others have computed. `caches`: also keeps it, for the next prompt that begins alike.

    `failures`: the share of transfers that fail. `mooncake`: one that has failed ends its session with that replica;
    SGLang's keeps it so until a probe of its own reaches the other one. `num_waiting`: requests that wait for KV.
    `num_failed`: transfers.
    """

    def __init__(self, speed: float, *, caches: bool, failures: float, mooncake: bool = False) -> None:
        self._speed = speed
        self._caches = caches
        self._failures = failures
        self._mooncake = mooncake
        self._dead_sessions: set[tuple[str, int]] = set()
        self._rng = Random(0)
        self._in_use: set[int] = set()
        self._reserved: dict[EmulatedEngine, int] = {}
        self._turn = asyncio.Lock()
        self._freed = asyncio.Condition()
        self.num_waiting = 0
        self.num_failed = 0

    @asynccontextmanager
    async def generating(
        self, engines: Sequence[EmulatedEngine], chosen: EmulatedEngine, body: PairedBody, prompts: Sequence[Prompt]
    ) -> AsyncIterator[Generation]:
        """Give the tokens of each prompt, the first once its KV is here. Raises: PairFailed."""
        del engines
        at = addresses(body, len(prompts) // body.num_choices)
        if at[0].host == NO_TRANSFER:
            with chosen.generate([_other_text(prompt) for prompt in prompts]) as generation:
                yield generation
            return
        if body.num_choices > 1:
            raise chosen.die(SharedRoom(f"Unexpected poll case: 4 ({body.num_choices} answers in one room)"))
        need = sum(chosen.num_blocks_of(prompt) for prompt in prompts)
        async with self._in_rooms({one.room for one in at}), self._room_for(chosen, need):
            received = await self._all_received(chosen, at, prompts)
            with chosen.generate(received) as generation:
                yield generation

    @asynccontextmanager
    async def _in_rooms(self, rooms: set[int]) -> AsyncIterator[None]:
        """Wait in vain where another request is in one of them, or one is 0, which SGLang takes for none."""
        if 0 in rooms or rooms & self._in_use:
            await asyncio.sleep(WAITS_S / self._speed)
            raise failed("Decode transfer", min(rooms), "Duplicate or cancelled bootstrap room")
        self._in_use |= rooms
        try:
            yield
        finally:
            self._in_use -= rooms

    @asynccontextmanager
    async def _room_for(self, engine: EmulatedEngine, need: int) -> AsyncIterator[None]:
        """Reserve blocks, first come, first served."""
        if need > engine.num_blocks:
            raise PairFailed(503, f"the request needs {need} blocks, and there are {engine.num_blocks}")
        async with self._turn, self._freed:
            await self._freed.wait_for(lambda: self._reserved.get(engine, 0) + need <= engine.num_blocks)
            self._reserved[engine] = self._reserved.get(engine, 0) + need
        try:
            yield
        finally:
            self._reserved[engine] -= need
            await asyncio.shield(self._say_freed())

    async def _say_freed(self) -> None:
        async with self._freed:
            self._freed.notify_all()

    async def _all_received(
        self, engine: EmulatedEngine, at: Sequence[Address], prompts: Sequence[Prompt]
    ) -> Sequence[Prompt]:
        self.num_waiting += 1
        try:
            async with asyncio.TaskGroup() as group:
                pairs = zip(at, prompts, strict=True)
                tasks = [group.create_task(self._received(engine, one, prompt)) for one, prompt in pairs]
            self._fail_by_chance(at[0])
        except (PairFailed, ExceptionGroup) as failure:
            self.num_failed += 1
            raise (failure if isinstance(failure, PairFailed) else failure.exceptions[0]) from None
        finally:
            self.num_waiting -= 1
        return [task.result() for task in tasks]

    def _fail_by_chance(self, at: Address) -> None:
        """Raises: PairFailed."""
        session = (at.host, at.port)
        if session in self._dead_sessions:
            dead = "Decode instance could be dead, remote mooncake session is not alive"
            raise failed("Decode transfer", at.room, dead)
        if self._rng.random() < self._failures:
            if self._mooncake:
                self._dead_sessions.add(session)
            raise failed("Decode transfer", at.room, "KV transfer failed")

    async def _received(self, engine: EmulatedEngine, at: Address, prompt: Prompt) -> Prompt:
        """Return a prompt with its KV, apart from others' unless it may serve them, too."""
        if not self._caches:
            prompt = replace(prompt, namespace=f"{prompt.namespace}room {at.room}")
        size = engine.block_size
        has = num_cached_blocks(prompt.tokens, prompt.namespace, size, frozenset(engine.scheduler.cached_hashes()))
        sent = await self._ask(at, has * size if self._caches else 0)
        if sent.prompt != crc32(prompt.tokens):
            prompt = _other_text(prompt)
        blocks = frozenset(hash_blocks(prompt.tokens, size, namespace=prompt.namespace))
        return replace(prompt, copied=blocks, said_cached=sent.cached_tokens)

    async def _ask(self, at: Address, has: int) -> Sent:
        url, timeouts = f"http://{at.host}:{at.port}", HttpTimeouts(control_s=WAITS_S / self._speed)
        http = HttpClient(url, ReplicaId("prefill"), timeouts=timeouts)
        try:
            await self._reached(http, at)
            try:
                answer = await http.ask(ROOMS_PATH, msgspec.json.encode(Wanted(at.room, has)))
                return answer.decode(Sent)
            except EngineError:
                await asyncio.sleep(LOST_S / self._speed)
                lost = f"Lost connection with prefill instance (bootstrap_addr: {at.host}:{at.port})"
                raise failed("Decode handshake", at.room, lost) from None
        finally:
            await http.close()

    async def _reached(self, http: HttpClient, at: Address) -> None:
        try:
            async with asyncio.timeout(max(UNREACHABLE_S / self._speed, LEAST_UNREACHABLE_S)):
                while not await _answers(http):  # noqa: ASYNC110 (another process's state cannot be awaited)
                    await asyncio.sleep(RETRY_S / self._speed)
        except TimeoutError:
            raise failed("Decode handshake", at.room, "Aborted by AbortReq.") from None


async def _answers(http: HttpClient) -> bool:
    try:
        (await http.ask("/health")).require_ok()
    except EngineError:
        return False
    return True


def _other_text(prompt: Prompt) -> Prompt:
    """Return the same prompt, whose answer says something else than it should: it has the wrong KV, or none."""
    return replace(prompt, seed=prompt.seed + 1, output=None)
