"""HTTP of the emulator: bodies read, answers sent, work that ends when its client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from preble.errors import BodyTooLarge

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Result = TypeVar("Result")

MAX_BODY_BYTES = 128 * 2**20


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


class Exchange:
    """One request and its answer. `profile`: named in a header of the answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, profile: str) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self._profile = profile.encode()

    async def read(self) -> bytes:
        """The whole request body. Raises: ClientGone, BodyTooLarge."""
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > MAX_BODY_BYTES:
                raise BodyTooLarge(f"the request body is larger than {MAX_BODY_BYTES} bytes")
            if not message.get("more_body"):
                return b"".join(parts)

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, which is cancelled as soon as the client goes away. Raises: ClientGone."""
        working = asyncio.create_task(work)
        watching = asyncio.create_task(self._disconnected())
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientGone
            return working.result()
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def stream(self, events: AsyncGenerator[bytes, None]) -> None:
        """Send server-sent events as they come."""
        await self._start(200, b"text/event-stream; charset=utf-8")
        async with aclosing(events):
            async for event in events:
                await self._send({"type": "http.response.body", "body": event, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    async def json(self, data: Any, status: int = 200) -> None:
        """Send a whole answer in JSON."""
        await self.whole(msgspec.json.encode(data), b"application/json", status)

    async def whole(self, body: bytes, content_type: bytes, status: int = 200) -> None:
        """Send a whole answer."""
        await self._start(status, content_type, (b"content-length", str(len(body)).encode()))
        await self._send({"type": "http.response.body", "body": body})

    async def _start(self, status: int, content_type: bytes, *more: tuple[bytes, bytes]) -> None:
        headers = [(b"x-preble-emulated", self._profile), (b"content-type", content_type), *more]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
