"""What the gateway needs from a replica, whatever program it runs.

One `Engine` is the client of one replica. It knows the program's dialect (how to ask for its configuration, its token
ids, its KV events); it does not know any other replica, the scheduler or the client's connection.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from preble.core.types import KvEvent, ReplicaId, ReplicaSpec


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a replica says of itself.

    `engine`: "vllm", "sglang", "emulator" or "openai". `models`: the names it serves, the first is the base model;
    `adapters`: those among them that are adapters (LoRA) on the base model, whose prompts share no KV with it.
    `spec`: as the scheduler takes it.
    """

    engine: str
    models: tuple[str, ...]
    spec: ReplicaSpec
    max_model_len: int | None = None
    version: str | None = None
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What a replica says of its own load, whoever caused it: requests that run and that wait there, and the tokens of
    KV cache that are in use (not those that are merely cached)."""

    running: int
    waiting: int
    kv_tokens: int


class EngineResponse(Protocol):
    """An answer that is being received. Its body can be read once."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def heard_at(self) -> float | None:
        """When the last piece of the body came, by the event loop's clock; None before the first."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives.

        Raises: EngineGone: the connection broke before the end. EngineTimeout: nothing came for too long.
        """
        ...


class Engine(Protocol):
    """The client of one replica."""

    @property
    def replica_id(self) -> ReplicaId: ...

    @property
    def url(self) -> str: ...

    async def probe(self) -> EngineInfo:
        """Ask the replica what it is and serves. Raises: EngineError."""
        ...

    async def check_ready(self) -> None:
        """Return if the replica can take requests now, cheaply. Raises: EngineError."""
        ...

    def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> AbstractAsyncContextManager[EngineResponse]:
        """POST a JSON body. Leaving the context before the body's end aborts the work in the engine.

        Raises, on entering: EngineRefused, EngineGone, EngineTimeout.
        """
        ...

    async def tokenize(self, body: bytes) -> list[int]:
        """Token ids of a completion or chat body, as the engine itself would make them.

        Raises: EngineError. RequestError: the engine says that the body is wrong.
        """
        ...

    def kv_events(self) -> AsyncIterator[KvEvent] | None:
        """Changes of the replica's prefix cache, from the beginning, for ever; None where it reports none.

        Starts with `CacheCleared`, then everything that is cached now, then every change. After a gap that cannot be
        replayed, or a restart of the engine, it starts over in the same way. Reconnects by itself; ends when closed.
        """
        ...

    def resync_kv_events(self) -> None:
        """Have the KV events start over soon, since they do not add up. Changes nothing where there are none."""
        ...

    def loads(self) -> AsyncIterator[EngineLoad | None] | None:
        """The replica's load by its own account, each time it tells, for ever; None where it does not tell.

        Yields None when it has fallen silent: then its load is unknown. Reconnects by itself; ends when closed.
        """
        ...

    async def close(self) -> None:
        """Close every connection. May be called twice."""
        ...
