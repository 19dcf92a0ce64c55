"""The client of a page or an upload, over ASGI: reading its body, answering it, and noticing that it has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from types import TracebackType
from typing import Any

import msgspec

from preble.errors import BodyTooSlow
from preble.gateway.http.body_memory import BodyShare
from preble.gateway.http.limited_body import LimitedBody
from preble.gateway.http.placement_headers import shown_headers
from preble.prompts.endpoints import JSON_TYPE, ErrorForm, ErrorStyle, HeaderList
from preble.rules.callers import ANYBODY
from preble.web.heads import by_name
from preble.web.server.connection import BODY_OVER

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_LARGE_ANSWER_BYTES = 64 * 1024
"""The server takes an answer of this size without waiting for the client. The end of a larger one is sent by itself, so
that its request counts as being served while the answer takes memory."""
CLIENT_GONE = 499
"""The status that metrics show for clients that went away; no client sees it."""


class ClientGone(Exception):
    """The client has closed the connection; no answer is possible."""


class AsgiClient:
    """The client of one request. `status`: of the answer, None before it begins. `query`: the URL's part after `?`."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.headers: dict[bytes, bytes] = by_name(scope["headers"])
        self.status: int | None = None
        self.caller = ANYBODY
        """Who sends the request. Only an admin sees where it was placed."""
        self.errors = ErrorStyle.OPENAI
        """The form in which the client expects errors."""
        self.is_last: Callable[[], bool] = lambda: False
        """Whether the connection ends with this answer, asked when it begins."""
        self.browsers: HeaderList = []
        """Sent with every answer, for the browser that asks for a page."""
        self.request_id: str | None = None
        """Sent with every answer, errors included, once it is set."""
        self.model = ""
        """As metrics name it, "" where the request names none that is served."""
        self._receive = receive
        self._send = send
        self._complete = False
        self._body_over: asyncio.Event = scope.get(BODY_OVER) or asyncio.Event()
        self._uploads = False

    async def read_body(self, limit: int, timeout_s: float, share: BodyShare) -> bytes:
        """Return the whole body; `share` grows as it arrives.

        Raises: BodyTooLarge, BodyTooSlow, Overloaded, ClientGone.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read(limit, share)
        except TimeoutError as error:
            raise BodyTooSlow(f"the body did not arrive within {timeout_s:g} s") from error

    def pieces(self, timeout_s: float) -> AsyncIterator[bytes]:
        """Yield the body as it comes; each piece within `timeout_s`. Raises: BodyTooSlow, ClientGone."""
        self._uploads = True
        return self._pieces(timeout_s)

    async def _pieces(self, timeout_s: float) -> AsyncIterator[bytes]:
        more = True
        while more:
            try:
                async with asyncio.timeout(timeout_s):
                    message = await self._next_piece()
            except TimeoutError as error:
                raise BodyTooSlow(f"nothing of the body arrived for {timeout_s:g} s") from error
            more = message.get("more_body", False)
            if not more:
                self._body_over.set()
            yield message["body"]

    async def _read(self, limit: int, share: BodyShare) -> bytes:
        body = LimitedBody(limit, self.declared_length(), share)
        body.check_declared()
        more = True
        while more:
            message = await self._next_piece()
            body.add(message["body"])
            more = message.get("more_body", False)
        return body.whole()

    def declared_length(self) -> int:
        """Return the length that the client gave for the body, 0 for none."""
        declared = self.headers.get(b"content-length", b"0")
        return int(declared) if declared.isdigit() else 0

    async def _next_piece(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message

    def watched(self) -> WatchedClient:
        """A context in which the work for this client is cancelled when it goes; it raises `ClientGone` then."""
        return WatchedClient(self)

    async def wait_until_gone(self) -> None:
        """Return when the client has closed the connection before it got its whole answer."""
        if self._uploads:
            await self._body_over.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._complete:
            # Servers also send "disconnect" once an answer is complete; the client has not gone then.
            await asyncio.get_running_loop().create_future()

    async def reply(self, status: int, headers: HeaderList, body: bytes) -> None:
        """Send a whole answer. Waits until a client that reads slowly has read most of a large one."""
        await self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        self._complete = True
        if len(body) > _LARGE_ANSWER_BYTES:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            body = b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def reply_json(self, status: int, page: object) -> None:
        """Send a whole answer, encoded as JSON."""
        await self.reply(status, [JSON_TYPE], msgspec.json.encode(page))

    async def begin(self, status: int, headers: HeaderList) -> None:
        """Begin a streamed answer."""
        await self._start(status, headers)

    async def write(self, chunk: bytes) -> None:
        """Send the next bytes of a streamed answer. Waits while the client reads slowly."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        """End a streamed answer."""
        self._complete = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, status: int, headers: HeaderList) -> None:
        self.status = status
        headers = [*shown_headers(headers, self.caller, self.request_id), *self.browsers]
        if self.is_last():
            headers = [*headers, (b"connection", b"close")]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def fail(self, form: ErrorForm) -> None:
        """Send an error, unless an answer has begun."""
        if self.status is None:
            await self.reply(form.status, form.headers(), form.body(self.errors))


class WatchedClient:
    """See `AsgiClient.watched`. Not reusable."""

    def __init__(self, client: AsgiClient) -> None:
        self._client = client
        self._is_gone = False

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        self._worker = asyncio.current_task(loop)
        self._watcher = loop.create_task(self._watch())

    async def _watch(self) -> None:
        await self._client.wait_until_gone()
        self._is_gone = True
        if self._worker is not None:
            self._worker.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        # The watcher keeps its cancellation, whose traceback holds the whole request: without a reference from here, it
        # all goes at once, not in a full garbage collection, which is rare.
        del self._watcher
        if self._is_gone and self._worker is not None:
            self._worker.uncancel()
            raise ClientGone from error
