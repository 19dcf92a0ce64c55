"""The client of a page or an upload: reading its body, and answering it in the endpoint's form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import msgspec

from preble.errors import BodyTooSlow
from preble.gateway.http.bodies import BodyShare, LimitedBody
from preble.gateway.http.headers import shown_headers
from preble.prompts.endpoints import JSON_TYPE, ErrorForm, ErrorStyle, HeaderList
from preble.rules.callers import ANYBODY
from preble.web.server.awaited import AwaitedRequest

if TYPE_CHECKING:
    from preble.gateway.http.passed_on import PassedOn

CLIENT_GONE = 499
"""The status that metrics show for clients that went away; no client sees it."""


class PageClient:
    """The client of one request. `status`: of the answer, None before it begins."""

    def __init__(self, request: AwaitedRequest | PassedOn) -> None:
        self.head = request.head
        self.path = request.head.path
        self.headers = request.head.headers
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
        self._request = request

    async def read_body(self, limit: int, timeout_s: float, share: BodyShare) -> bytes:
        """Return the whole body; `share` grows as it arrives.

        Raises: BodyEncoded, BodyTooLarge, BodyTooSlow, Overloaded, ClientGone.
        """
        body = LimitedBody(self.head, limit, share)
        body.check_head()
        try:
            async with asyncio.timeout(timeout_s):
                while piece := await self._request.piece():
                    body.add(piece)
        except TimeoutError as error:
            raise BodyTooSlow(f"the body did not arrive within {timeout_s:g} s") from error
        return body.whole()

    async def pieces(self, timeout_s: float) -> AsyncIterator[bytes]:
        """Yield the body as it comes; each piece within `timeout_s`. Raises: BodyTooSlow, ClientGone."""
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    piece = await self._request.piece()
            except TimeoutError as error:
                raise BodyTooSlow(f"nothing of the body arrived for {timeout_s:g} s") from error
            if not piece:
                return
            yield piece

    def unless_gone(self) -> AbstractContextManager[None]:
        """Return a context in which the current task is cancelled when the client goes. Raises: ClientGone: it did."""
        return self._request.unless_gone()

    async def reply(self, status: int, headers: HeaderList, body: bytes) -> None:
        """Send a whole answer. Waits until a client that reads slowly has read most of it."""
        self._request.reply(status, self._shown(status, headers), body)
        await self._request.drained()

    async def reply_json(self, status: int, page: object) -> None:
        """Send a whole answer, encoded as JSON."""
        await self.reply(status, [JSON_TYPE], msgspec.json.encode(page))

    def begin(self, status: int, headers: HeaderList) -> None:
        """Begin a streamed answer."""
        self._request.begin(status, self._shown(status, headers))

    async def write(self, chunk: bytes) -> None:
        """Send the next bytes of a streamed answer. Waits while the client reads slowly."""
        self._request.write(chunk)
        await self._request.drained()

    def end(self) -> None:
        """End a streamed answer."""
        self._request.end()

    def _shown(self, status: int, headers: HeaderList) -> HeaderList:
        self.status = status
        headers = [*shown_headers(headers, self.caller, self.request_id), *self.browsers]
        return [*headers, (b"connection", b"close")] if self.is_last() else headers

    async def fail(self, form: ErrorForm) -> None:
        """Send an error, unless an answer has begun."""
        if self.status is None:
            await self.reply(form.status, form.headers(), form.body(self.errors))
