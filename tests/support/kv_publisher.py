"""A publisher of KV events under the test's control: the engine's side of the conversation, on real sockets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from preble.engines.kv_events.sockets import END_OF_REPLAY, KvEventEndpoints
from support.waiting import PATIENCE_S, eventually

BLOCK_SIZE = 2
TOPIC = "kv@test"


def stored(*blocks: int, parent: int | None = None, **more: Any) -> dict[str, Any]:
    """A BlockStored event; block `b` holds the tokens `b` and `b + 1`."""
    tokens = [token for block in blocks for token in (block, block + 1)]
    event = {"type": "BlockStored", "block_hashes": list(blocks), "parent_block_hash": parent, "token_ids": tokens}
    return {**event, "block_size": BLOCK_SIZE, "lora_id": None, "medium": "GPU", "lora_name": None, **more}


def removed(*blocks: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(blocks), "medium": "GPU", **more}


def cleared() -> dict[str, Any]:
    return {"type": "AllBlocksCleared"}


class ScriptedPublisher:
    """Publishes what the test says, numbers it as an engine does, and repeats it on request.

    `keeps`: how many past messages. `replays`: whether it has a replay endpoint at all.
    """

    def __init__(self, *, keeps: int = 10_000, replays: bool = True) -> None:
        self._context = zmq.asyncio.Context()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=keeps)
        self._replays = replays
        self._seq = 0
        self._clock = 0.0
        self._endpoint = self._replay_endpoint = "tcp://127.0.0.1:*"
        self.replay_requests: list[int] = []
        self.holes: set[int] = set()
        """Numbers that a replay leaves out, as one whose queue overflows does; each is left out once."""

    async def __aenter__(self) -> ScriptedPublisher:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()
        self._context.destroy(linger=0)

    async def _start(self) -> None:
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._endpoint = await _bound(self._pub, self._endpoint)
        self._router = self._context.socket(zmq.ROUTER)
        self._replay_endpoint = await _bound(self._router, self._replay_endpoint)
        self._task = asyncio.create_task(self._serve_replays())

    async def _stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._pub.close(linger=0)
        self._router.close(linger=0)

    async def restart(self) -> None:
        """A new process at the same addresses: it counts from 0 and knows nothing of the past."""
        await self._stop()
        self._buffer.clear()
        self._seq = 0
        await self._start()

    @property
    def endpoints(self) -> KvEventEndpoints:
        return KvEventEndpoints(self._endpoint, self._replay_endpoint if self._replays else None, TOPIC)

    async def subscribed(self) -> None:
        """Return when a (further) subscription has come in."""
        async with asyncio.timeout(PATIENCE_S):
            await self._pub.recv()

    async def publish(self, *events: Any, lose: bool = False) -> None:
        """One message with these events. `lose`: it never reaches the subscribers."""
        self._clock += 1.0
        await self.publish_payload(msgspec.msgpack.encode([self._clock, list(events), 0]), lose=lose)

    async def publish_payload(self, payload: bytes, *, lose: bool = False) -> None:
        seq, self._seq = self._seq, self._seq + 1
        self._buffer.append((seq, payload))
        if not lose:
            await self.send(TOPIC.encode(), seq.to_bytes(8, "big"), payload)

    async def send(self, *frames: bytes) -> None:
        """These frames, whatever they are."""
        await self._pub.send_multipart(frames)

    async def repeat(self) -> None:
        """Send the newest message again."""
        seq, payload = self._buffer[-1]
        await self.send(TOPIC.encode(), seq.to_bytes(8, "big"), payload)

    async def _serve_replays(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            self.replay_requests.append(int.from_bytes(start, "big"))
            for seq, payload in self._selected(int.from_bytes(start, "big")):
                await self._router.send_multipart([client, b"", TOPIC.encode(), seq.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    def _selected(self, start: int) -> Sequence[tuple[int, bytes]]:
        chosen = [(seq, payload) for seq, payload in self._buffer if seq >= start and seq not in self.holes]
        self.holes.clear()
        return chosen


async def _bound(socket: zmq.asyncio.Socket, address: str) -> str:
    """Bind, as soon as a socket that was closed before has let go of the address."""

    def is_free() -> bool:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            return False
        return True

    await eventually(is_free, f"{address} can be bound")
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
