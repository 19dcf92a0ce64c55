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


class Sender:
    """Sends answers. `profile`: named in a header of each."""

    def __init__(self, profile: str) -> None:
        self._headers = [(b"x-preble-emulated", profile.encode())]

    async def stream(self, events: AsyncGenerator[bytes, None], send: Send) -> None:
        """Send server-sent events as they come."""
        await self._start(send, 200, b"text/event-stream; charset=utf-8")
        async with aclosing(events):
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def json(self, send: Send, data: Any, status: int = 200) -> None:
        """Send a whole answer in JSON."""
        await self.whole(send, msgspec.json.encode(data), b"application/json", status)

    async def whole(self, send: Send, body: bytes, content_type: bytes, status: int = 200) -> None:
        """Send a whole answer."""
        await self._start(send, status, content_type, (b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.body", "body": body})

    async def _start(self, send: Send, status: int, content_type: bytes, *more: tuple[bytes, bytes]) -> None:
        headers = [*self._headers, (b"content-type", content_type), *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


async def read_body(receive: Receive) -> bytes:
    """The whole request body. Raises: ClientGone, BodyTooLarge."""
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the request body is larger than {MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled as soon as the client goes away. Raises: ClientGone."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
