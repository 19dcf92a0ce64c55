"""An emulated replica that does badly when it is told to: `python -m chaos.replica NAME PORT SPEED`.

It answers as `preble emulate` does, until `POST /way` names one of `WAYS`. The name is in each answer's
`system_fingerprint`, so that a client knows from the first event who answers it.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from preble.core.types import BlocksEvicted, BlocksStored, ReplicaId, pack_tokens
from preble.emulator import EmulatorConfig, run, server
from preble.emulator.app import EmulatorApp
from preble.emulator.web import EmulatorRequest

PROFILE = "tiny-cpu"
MODEL = "tiny"
WELL = "well"
SLOW_S = 1.0
BLOCK = 16
Way = Callable[[EmulatorRequest], Coroutine[Any, Any, None]]
_CACHED = re.compile(rb'"cached_tokens":\d+')


class MoodyApp(EmulatorApp):
    """An emulated replica whose way of answering can be set."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._fingerprint = self._generating._fingerprint = sys.argv[1]
        self._way = WELL
        self._is_well = asyncio.Event()
        self._ways: Mapping[str, Way] = {
            "500": self._fail,
            "error": self._error_as_answer,
            "garbage": self._garbage,
            "busy": self._busy,
            "slow": self._slow,
            "silent": self._silent,
            "cut": self._cut,
            "usage": self._lying_usage,
        }

    async def answer(self, exchange: EmulatorRequest) -> None:
        path = exchange.path
        if path == "/way":
            await self._set(exchange)
        elif self._way == "unwell" and path in ("/health", "/v1/models"):
            await exchange.json({"error": {"message": "unwell"}}, 503)
        elif path.endswith("/completions") and self._way in self._ways:
            await self._ways[self._way](exchange)
        else:
            await super().answer(exchange)

    async def _set(self, asked: EmulatorRequest) -> None:
        self._way = (await asked.read()).decode()
        if self._way == WELL:
            self._is_well.set()
        else:
            self._is_well.clear()
        if self._way == "events":
            await self._publish_lies()
        await asked.json({"way": self._way})

    async def _publish_lies(self) -> None:
        """Claims of blocks that nobody asked for, without their parents, removals of unknown ones, and a gap."""
        rng = random.Random(self._fingerprint)
        me = ReplicaId("")
        for publisher in self._publishers:
            for _ in range(100):
                blocks = [rng.getrandbits(63) for _ in range(5)]
                tokens = pack_tokens([rng.randrange(4096) for _ in range(4 * BLOCK)])
                parent = None if rng.random() < 0.5 else blocks[0]
                stored = BlocksStored(me, tuple(blocks[1:]), parent, tokens, BLOCK)
                await publisher.publish([stored, BlocksEvicted(me, (rng.getrandbits(63),))])
            publisher._seq += 3

    async def _fail(self, exchange: EmulatorRequest) -> None:
        await exchange.json({"error": {"message": "CUDA error"}}, 500)

    async def _error_as_answer(self, exchange: EmulatorRequest) -> None:
        await exchange.json({"error": {"message": "CUDA error"}})

    async def _garbage(self, exchange: EmulatorRequest) -> None:
        await exchange.whole(b"<html>" + b"x" * 20_000, b"text/html")

    async def _busy(self, exchange: EmulatorRequest) -> None:
        message = b'{"error": {"message": "busy"}}'
        await exchange.whole(message, b"application/json", 429, (b"retry-after", b"1"))

    async def _slow(self, exchange: EmulatorRequest) -> None:
        await asyncio.sleep(SLOW_S)
        await super().answer(exchange)

    async def _silent(self, exchange: EmulatorRequest) -> None:
        """Nothing, until it is well again."""
        await self._is_well.wait()
        await super().answer(exchange)

    async def _cut(self, exchange: EmulatorRequest) -> None:
        """The connection breaks after the first piece of an answer."""

        write = exchange.write

        def write_once(data: bytes) -> None:
            write(data)
            raise ConnectionAbortedError("cut, as it was told")

        exchange.write = write_once  # type: ignore[method-assign]
        await super().answer(exchange)

    async def _lying_usage(self, exchange: EmulatorRequest) -> None:
        """Streams say that millions of tokens were cached."""

        write = exchange.write
        exchange.write = lambda data: write(_CACHED.sub(b'"cached_tokens":33554432', data))  # type: ignore[method-assign]
        await super().answer(exchange)


def main() -> None:
    _, _, port, speed, *tokenizer = sys.argv
    server.EmulatorApp = MoodyApp  # type: ignore[misc]
    settings = EmulatorConfig(
        profile=PROFILE,
        model=MODEL,
        port=int(port),
        events_port=0,
        block_size=BLOCK,
        speed=float(speed),
        tokenizer=tokenizer[0] if tokenizer else None,
        max_model_len=2048,
    )
    run(settings)


if __name__ == "__main__":
    main()
