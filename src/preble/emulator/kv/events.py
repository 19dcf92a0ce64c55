"""KV events over ZMQ as vLLM publishes them: three frames, msgpack, and a socket that repeats what was missed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import structlog
import zmq
import zmq.asyncio

from preble.core.types import BlockHash, BlocksEvicted, BlocksStored, CacheCleared, KvEvent, Tier, unpack_tokens
from preble.emulator.answers.placeholders import EmulatedMedia, Keys
from preble.emulator.config import EmulatorConfig
from preble.emulator.kv.tiers import Change
from preble.engines.kv_events.sockets import END_OF_REPLAY
from preble.errors import ConfigError

BUFFER_STEPS = 10_000
"""Batches kept for replay, vLLM's default."""
_MEDIA = ((Tier.HOST, "CPU"), (Tier.STORE, "STORAGE"))

_log = structlog.get_logger("preble.emulator")


class _Stored(msgspec.Struct, tag="BlockStored", tag_field="type"):
    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    extra_keys: Keys | None
    lora_id: int | None = None
    medium: str = "GPU"
    lora_name: str | None = None
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"


class _Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type"):
    block_hashes: Sequence[BlockHash]
    medium: str = "GPU"
    group_idx: int = 0


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


class _PublishedBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int = 0


_SEPARATOR = "\x1f"


def own_namespace(adapter: str, cache_salt: str) -> str:
    """Return how the emulated engine itself keeps apart what is computed with this adapter and this salt."""
    return f"{adapter}{_SEPARATOR}{cache_salt}" if adapter or cache_salt else ""


def wire_events(events: Iterable[KvEvent], media: EmulatedMedia) -> Iterator[_Stored | _Removed | _Cleared]:
    """Yield the same changes in vLLM's form: one removal a block; a salt stands at the first block of its prompt."""
    for event in events:
        match event:
            case BlocksStored():
                adapter, _, salt = event.namespace.rpartition(_SEPARATOR)
                keys: Keys = [(adapter,) if adapter else None] * len(event.block_hashes)
                tokens = list(unpack_tokens(event.tokens))
                media.name_in(tokens, event.block_size, keys)
                if salt and event.parent is None:
                    keys[0] = (*(keys[0] or ()), salt)
                name = adapter or None
                yield _Stored(event.block_hashes, event.parent, tokens, event.block_size, keys, lora_name=name)
            case BlocksEvicted():
                yield from (_Removed((block_hash,)) for block_hash in event.block_hashes)
            case CacheCleared():
                yield _Cleared()


def wire_copy(change: Change) -> _Stored | _Removed:
    """Return a change beside the engine's memory as vLLM reports it unless it is asked for more: by hash alone."""
    tier, blocks, is_put = change
    medium = dict(_MEDIA)[tier]
    return _Stored(blocks, None, [], 0, None, medium=medium) if is_put else _Removed(blocks, medium)


class KvEventPublisher:
    """Publishes batches of events under growing numbers from 0, and repeats the last ones to who asks.

    Run `serve_replay` as a task; `close` when it has ended.
    """

    def __init__(self, config: EmulatorConfig, rank: int = 0, media: EmulatedMedia | None = None) -> None:
        """Binds both sockets, at the configured ports plus `rank`, which each batch names. `media`: in the prompts.

        Raises: ConfigError: an address cannot be bound.
        """
        self._rank = rank
        self._said_port = config.said_events_port
        self._media = media or EmulatedMedia(config.image_tokens)
        self._topic = config.events_topic
        self._context = zmq.asyncio.Context()
        self._seq = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.replay_batches)
        self._encode = msgspec.msgpack.Encoder().encode
        try:
            self._publish_socket, self.endpoint = self._bind(zmq.PUB, config.host, config.events_port or 0)
            self._replay_socket, self.replay_endpoint = self._bind(zmq.ROUTER, config.host, config.replay_port)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _bind(self, kind: int, host: str, port: int) -> tuple[zmq.asyncio.Socket, str]:
        socket = self._context.socket(kind)
        port = port and port + self._rank
        # A slow listener must miss nothing: neither socket drops for a full queue.
        socket.set_hwm(0)
        address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        socket.setsockopt(zmq.IPV6, int(":" in host))
        try:
            socket.bind(f"{address}:{port or '*'}")
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot publish KV events at {address}:{port}: {error.strerror}") from error
        bound: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return socket, bound

    @property
    def position(self) -> int:
        """Number of the newest batch, -1 before the first."""
        return self._seq - 1

    async def publish(self, events: Iterable[KvEvent], copies: Iterable[Change] = ()) -> None:
        """Send one batch; nothing where there is no event. `copies`: what changed beside the engine's memory."""
        wire = [*wire_events(events, self._media), *map(wire_copy, copies)]
        if not wire:
            return
        payload = self._encode(_PublishedBatch(time.time(), wire, self._rank))
        self._buffer.append((self._seq, payload))
        frames = [self._topic.encode(), self._seq.to_bytes(8, "big"), payload]
        self._seq += 1
        await self._publish_socket.send_multipart(frames)

    async def serve_replay(self) -> None:
        """Answer requests for what was missed, until cancelled."""
        while True:
            frames = await self._replay_socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                _log.warning("replay_request_ignored", num_frames=len(frames))
                continue
            client, _, start = frames
            for seq, payload in [kept for kept in self._buffer if kept[0] >= int.from_bytes(start, "big")]:
                await self._replay_socket.send_multipart(
                    [client, b"", self._topic.encode(), seq.to_bytes(8, "big"), payload]
                )
            await self._replay_socket.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    def source(self) -> dict[str, Any]:
        """Return this publisher as `/kv_event_sources` describes it."""
        said = self.endpoint if self._said_port is None else f"{self.endpoint.rpartition(':')[0]}:{self._said_port}"
        return event_source(said, self.replay_endpoint, self._topic, self._buffer.maxlen)

    def close(self) -> None:
        """Close both sockets; unsent events are lost. May be called twice."""
        self._context.destroy(linger=0)


def event_source(
    endpoint: str | None, replay_endpoint: str | None, topic: str, keeps: int | None = BUFFER_STEPS
) -> dict[str, Any]:
    """Return one rank's entry in `/kv_event_sources`; `endpoint` None for a replica that publishes none."""
    return {
        "enable_kv_cache_events": endpoint is not None,
        "publisher": "zmq" if endpoint else "null",
        "endpoint": endpoint or "tcp://*:5557",
        "replay_endpoint": replay_endpoint,
        "buffer_steps": keeps,
        "hwm": 0,
        "max_queue_size": 0,
        "topic": topic,
    }
