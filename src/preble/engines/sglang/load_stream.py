"""The load that an SGLang replica pushes (`--load-publish-endpoint`).

Only the newest reading counts, so missed ones are not asked for, unlike KV events.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

import msgspec
import structlog
from msgspec import Meta

from preble.core.types import ReplicaId
from preble.engines.adapter import EngineLoad
from preble.engines.kv_events.sockets import KvEventEndpoints
from preble.engines.kv_events.subscription import Subscription

TICK_S = 0.25
"""How often we look at most. An engine pushes after every prefill batch, which a gauge need not show, and waking up for
each would cost a gateway of many replicas more than the load is worth."""

LONGEST_WAIT_S = 3600.0

MAX_READINGS = 256
"""Taken in one look, so that a publisher gone mad cannot keep the event loop."""

_Count = Annotated[int, Meta(ge=0)]


class LoadStat(msgspec.Struct, array_like=True, tag="LoadStat"):
    """The first fields of SGLang's array; more follow, which we do not use."""

    num_running_reqs: _Count
    num_waiting_reqs: _Count
    num_tokens: _Count


_stats = msgspec.msgpack.Decoder(LoadStat)


class LoadStream:
    """The load of one replica. Iterate over `loads()` once; `close()` ends it."""

    def __init__(self, replica_id: ReplicaId, endpoints: KvEventEndpoints, *, silent_after_s: float = 10.0) -> None:
        """`endpoints`: framed as KV events are. `silent_after_s`: after so long without a reading the load is unknown;
        SGLang repeats itself every second, though not while it computes one large batch."""
        self._endpoints = endpoints
        self._silent_after_s = silent_after_s
        self._said: set[str] = set()
        self._log = structlog.get_logger("preble.engines.load").bind(replica=replica_id)
        self._subscription: Subscription | None = None
        self.closed = False

    def close(self) -> None:
        """End the stream soon; it closes its sockets itself. May be called twice."""
        self.closed = True
        if self._subscription is not None:
            self._subscription.wake()

    async def loads(self) -> AsyncGenerator[EngineLoad | None, None]:
        """Do as `Engine.loads` promises. Nothing that the engine sends makes it raise or end."""
        try:
            while not self.closed:
                with Subscription(self._endpoints) as self._subscription:
                    async with aclosing(self._follow(self._subscription)) as loads:
                        async for load in loads:
                            yield load
        finally:
            self.closed = True

    async def _follow(self, subscription: Subscription) -> AsyncGenerator[EngineLoad | None, None]:
        """Yield the readings of one connection; None when they stop coming and when it is lost."""
        loop = asyncio.get_running_loop()
        silent_at = loop.time() + self._silent_after_s
        while not self.closed and not subscription.is_lost():
            if (load := self._newest(subscription)) is not None:
                silent_at = loop.time() + self._silent_after_s
                yield load
            elif loop.time() >= silent_at:
                self._say_once("engine_load_silent", endpoint=self._endpoints.endpoint)
                silent_at = math.inf
                yield None
            await subscription.wait(min(silent_at - loop.time(), LONGEST_WAIT_S))
            await asyncio.sleep(TICK_S)
        yield None

    def _newest(self, subscription: Subscription) -> EngineLoad | None:
        """Return the last reading among those that have arrived; None for none."""
        load = None
        for _ in range(MAX_READINGS):
            if (message := subscription.take(self._on_rubbish)) is None:
                break
            load = self._decoded(message.payload) or load
        return load

    def _decoded(self, payload: bytes) -> EngineLoad | None:
        try:
            stat = _stats.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._on_rubbish()
            return None
        return EngineLoad(stat.num_running_reqs, stat.num_waiting_reqs, stat.num_tokens)

    def _on_rubbish(self) -> None:
        self._say_once("malformed_engine_load", hint="it is not SGLang's LoadStat; what is not is ignored")

    def _say_once(self, event: str, **details: object) -> None:
        if event not in self._said:
            self._said.add(event)
            self._log.warning(event, **details)
