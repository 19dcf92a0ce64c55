"""Prefill and decode as SGLang's fixed roles do them: two replicas meet in a room, and one computes for the other.

This is the side that prefills; `decoding` has the other.

Both get the same body with `bootstrap_host`, `bootstrap_port` (the prefilling one's) and `bootstrap_room`. The decoding
one reserves blocks, asks the other over HTTP, and decodes when it hears that the KV has been sent. Nothing but numbers
is sent. The traps of SGLang 0.5.23 are kept: nobody hears that the other leg has failed, and a room of two requests at
once gives one of them the other's text. Its long waits are shorter where the replica's `speed` is higher.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple
from uuid import uuid4
from zlib import crc32

import msgspec

from preble.core.costs.model import CostModel
from preble.core.types import TOKEN_BYTES, Request, RequestId
from preble.emulator.answers.protocol import PairedBody
from preble.emulator.engine import EmulatedEngine
from preble.emulator.generation import Generation, Prompt
from preble.errors import RequestError

NO_TRANSFER = "2.2.2.2"
"""As `bootstrap_host`: nothing is sent, as for health checks. Who decodes then says something else."""
DEFAULT_BOOTSTRAP_PORT = 8998
ROOMS_PATH = "/emulated_rooms"
MOST_ROOMS = 10_000
"""That one replica prefills in at once; more are refused."""
WAITS_S = 300.0
"""How long one leg waits for the other (`SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`, `..._WAITING_TIMEOUT`)."""


class PairFailed(Exception):
    """One leg has failed, with an HTTP status and SGLang's words."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status

    @property
    def fields(self) -> dict[str, object]:
        """Return the error of an answer that is not streamed."""
        kind = "BadRequestError" if self.status == 400 else str(self.status)
        return {"object": "error", "message": str(self), "type": kind, "param": None, "code": self.status}

    @property
    def event(self) -> dict[str, object]:
        """Return the error as SGLang puts it into a stream, whose status is 200."""
        kind = "BAD_REQUEST" if self.status == 400 else "INTERNAL_SERVER_ERROR"
        return {"error": {**self.fields, "type": kind}}


class Wanted(msgspec.Struct):
    """What the decoding replica asks for. `has`: tokens of the prompt that it need not be sent."""

    room: int
    has: int = 0


class Sent(msgspec.Struct):
    """What it hears when the KV has come. `prompt`: digest of the one that was computed."""

    prompt: int
    cached_tokens: int


class Address(NamedTuple):
    """Where one prompt's legs meet."""

    host: str
    port: int
    room: int


@dataclass(slots=True)
class _Room:
    wanted: list[Wanted] = field(default_factory=list)
    is_wanted: asyncio.Event = field(default_factory=asyncio.Event)
    sent: asyncio.Future[Sent] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    num_inside: int = 0


class Prefill:
    """Computes prompts for others, each once another wants it, and answers with one token.

    `num_waiting`: requests that nobody wants yet. `num_failed`: those that nobody wanted in time.
    """

    def __init__(self, cost_model: CostModel, speed: float) -> None:
        self._cost_model = cost_model
        self._speed = speed
        self._rooms: dict[int, _Room] = {}
        self._link = asyncio.Lock()
        self.num_waiting = 0
        self.num_failed = 0

    @asynccontextmanager
    async def generating(
        self, engines: Sequence[EmulatedEngine], chosen: EmulatedEngine, body: PairedBody, prompts: Sequence[Prompt]
    ) -> AsyncIterator[Generation]:
        """Give the one token of each prompt. Its rank is the room's remainder. Raises: PairFailed."""
        del chosen
        at = addresses(body, len(prompts) // body.num_choices)
        engine = engines[at[0].room % len(engines)]
        ones = [replace(prompt, output_tokens=1) for prompt in prompts]
        if at[0].host == NO_TRANSFER:
            with engine.generate(ones) as generation:
                yield generation
            return
        for prompt in prompts:
            engine.require_fit(prompt)
        async with AsyncExitStack() as stack:
            rooms = [await stack.enter_async_context(self._until_wanted(one.room)) for one in at]
            done = Generation(num_open=len(ones))
            with engine.generate(ones) as generation:
                async for pieces in generation.pieces():
                    for piece in pieces:
                        assert piece.finished is not None
                        cached = piece.finished.num_cached_tokens
                        place = piece.index // body.num_choices
                        await self._send(engine, ones[piece.index], rooms[place], cached)
                        done.feed(piece)
            yield done

    @asynccontextmanager
    async def _until_wanted(self, number: int) -> AsyncIterator[_Room]:
        with self._inside(number) as room:
            self.num_waiting += 1
            try:
                async with asyncio.timeout(WAITS_S / self._speed):
                    await room.is_wanted.wait()
            except TimeoutError:
                self.num_failed += 1
                raise failed("Prefill bootstrap", number, f"Request {number} timed out after {WAITS_S}s") from None
            finally:
                self.num_waiting -= 1
            yield room

    async def _send(self, engine: EmulatedEngine, prompt: Prompt, room: _Room, cached_tokens: int) -> None:
        """Send one after the other what others lack; what is being sent cannot be evicted."""
        has = room.wanted[0].has if room.wanted else 0
        link_s = self._cost_model.link_s(max(0, len(prompt.tokens) // TOKEN_BYTES - has))
        lent = engine.scheduler.lend(Request(RequestId("sent"), prompt.tokens, 1, prompt.namespace))
        try:
            if 0.0 < link_s < inf:
                async with self._link:
                    await asyncio.sleep((link_s + self._cost_model.link_latency_s) / self._speed)
        finally:
            engine.scheduler.take_back(lent)
        if not room.sent.done():
            room.sent.set_result(Sent(crc32(prompt.tokens), cached_tokens))

    async def wanted(self, wanted: Wanted) -> Sent:
        """Wait until what the other one wants has been sent; it is not told if this ends before. Raises: PairFailed."""
        with self._inside(wanted.room) as room:
            room.wanted.append(wanted)
            room.is_wanted.set()
            try:
                async with asyncio.timeout(WAITS_S / self._speed):
                    return await asyncio.shield(room.sent)
            except TimeoutError:
                raise failed("Decode transfer", wanted.room, "timed out") from None
            finally:
                room.wanted.remove(wanted)
                if not room.wanted:
                    room.is_wanted.clear()

    @contextmanager
    def _inside(self, number: int) -> Iterator[_Room]:
        if number not in self._rooms and len(self._rooms) >= MOST_ROOMS:
            raise PairFailed(503, f"there are {MOST_ROOMS} rooms already")
        room = self._rooms.setdefault(number, _Room())
        room.num_inside += 1
        try:
            yield room
        finally:
            room.num_inside -= 1
            if not room.num_inside:
                del self._rooms[number]


def addresses(body: PairedBody, num_prompts: int) -> Sequence[Address]:
    """Return where the legs of each prompt meet; those after the first of one number take the rooms after it.

    Raises: PairFailed: it names no room. RequestError: lists of other lengths.
    """
    room, host, port = body.bootstrap_room, body.bootstrap_host, body.bootstrap_port
    if room is None:
        rid = uuid4().hex
        said = f"Invalid request: Disaggregated request received without bootstrap room id. req.rid='{rid}'"
        raise PairFailed(400, said)
    rooms = room if isinstance(room, list) else [room + i for i in range(num_prompts)]
    hosts = host if isinstance(host, list) else [host] * num_prompts
    ports = port if isinstance(port, list) else [port] * num_prompts
    if not len(rooms) == len(hosts) == len(ports) == num_prompts:
        raise RequestError("bootstrap_host, bootstrap_port and bootstrap_room have other lengths than the prompts")
    return [Address(h or "", p or DEFAULT_BOOTSTRAP_PORT, r) for h, p, r in zip(hosts, ports, rooms, strict=True)]


def failed(what: str, room: int, why: str) -> PairFailed:
    """Return an error in SGLang's words."""
    said = f"{what} failed for request rank=0 decode_req.req.bootstrap_room={room}"
    return PairFailed(500, f"{said} with exception KVTransferError(bootstrap_room={room}): {why}")
