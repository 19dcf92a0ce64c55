"""HTTP of the emulator: bodies read, answers sent."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec

from preble.errors import BodyTooLarge
from preble.prompts.endpoints import ErrorForm, ErrorStyle
from preble.web.messages import HeaderList
from preble.web.server.answering import RequestHead
from preble.web.server.awaited import AwaitedRequest
from preble.web.server.connection import ClientConnection

MAX_BODY_BYTES = 128 * 2**20


class EmulatorRequest(AwaitedRequest):
    """One request and its answer. `profile`: named in a header of the answer."""

    def __init__(
        self,
        connection: ClientConnection,
        head: RequestHead,
        handle: Callable[[EmulatorRequest], Coroutine[Any, Any, None]],
        profile: str,
    ) -> None:
        super().__init__(connection, head, handle)
        self.method = head.method
        self.path = head.path
        self.headers = head.headers
        self._profile = profile.encode()

    async def read(self) -> bytes:
        """Return the whole request body. Raises: ClientGone, BodyTooLarge."""
        parts: list[bytes] = []
        num_bytes = 0
        while part := await self.piece():
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > MAX_BODY_BYTES:
                raise BodyTooLarge(f"the request body is larger than {MAX_BODY_BYTES} bytes")
        return b"".join(parts)

    async def stream(self, events: AsyncGenerator[bytes, None]) -> None:
        """Send server-sent events as they come."""
        self.begin(200, self._named(b"text/event-stream; charset=utf-8"))
        async with aclosing(events):
            async for event in events:
                self.write(event)
                await self.drained()
        self.end()

    async def json(self, data: Any, status: int = 200) -> None:
        """Send a whole answer in JSON."""
        await self.whole(msgspec.json.encode(data), b"application/json", status)

    async def whole(self, body: bytes, content_type: bytes, status: int = 200, *more: tuple[bytes, bytes]) -> None:
        """Send a whole answer. `more`: headers."""
        self.reply(status, [*self._named(content_type), *more], body)
        await self.drained()

    async def fail(self, form: ErrorForm, style: ErrorStyle = ErrorStyle.OPENAI) -> None:
        """Send an error."""
        await self.whole(form.body(style), b"application/json", form.status)

    def _named(self, content_type: bytes) -> HeaderList:
        return [(b"x-preble-emulated", self._profile), (b"content-type", content_type)]
