"""Answers that coroutines wait for. Requests of clients are carried by callbacks instead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from multidict import CIMultiDict

from preble.errors import EngineError, EngineGone, EngineTimeout
from preble.web.client.pool import Exchange, Ongoing, Receiver
from preble.web.messages import LAST_CHUNK, HeaderList, chunk

if TYPE_CHECKING:
    from preble.engines.http import HttpClient

_MOST_HELD_BYTES = 1024 * 1024
"""Unread bytes of an answer that is read more slowly than it comes; beyond them the replica waits."""


class AwaitedAnswer:
    """One request. Entering waits for the head of its answer; leaving before the end aborts the work in the engine."""

    def __init__(self, client: HttpClient, begin: Callable[[Receiver], Ongoing]) -> None:
        """`client`: for its timeouts and its errors. `begin`: sends the request."""
        self._client = client
        self._begin = begin
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.raw_headers: HeaderList = []
        """As they came, names in lower case."""
        self._ongoing: Ongoing | None = None
        self._pieces: list[bytes] = []
        self._error: EngineError | None = None
        self._is_complete = False
        self._is_taken = False
        self._news = asyncio.Event()
        self._first_byte_by: float | None = None

    async def __aenter__(self) -> AwaitedAnswer:
        """Raises: EngineRefused, EngineGone, EngineTimeout, EngineProtocolError."""
        self._first_byte_by = asyncio.get_running_loop().time() + self._client.timeouts.first_byte_s
        self._ongoing = self._begin(self)
        try:
            while not self.status:
                await self._wait(self._first_byte_by, "did not answer in time", is_silent=True)
                if self._error is not None:
                    raise self._error
        except BaseException:
            self._ongoing.abort()
            raise
        return self

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. It can be read once.

        Raises: EngineGone: the connection broke before the end. EngineTimeout: nothing came for too long.
        """
        if self._is_taken:
            raise RuntimeError("the body of an engine's answer can be read once")
        self._is_taken = True
        until = self._first_byte_by
        while True:
            if self._pieces:
                chunk = b"".join(self._pieces)
                self._pieces.clear()
                if self._ongoing is not None and len(chunk) > _MOST_HELD_BYTES:
                    self._ongoing.resume()
                yield chunk
                until = asyncio.get_running_loop().time() + self._client.timeouts.idle_s
            elif self._error is not None:
                raise self._error
            elif self._is_complete:
                return
            else:
                await self._wait(until, "sent nothing for too long", is_silent=False)

    async def _wait(self, until: float | None, what: str, *, is_silent: bool) -> None:
        """Return when there is something new. Raises: EngineTimeout."""
        try:
            async with asyncio.timeout_at(until):
                await self._news.wait()
        except TimeoutError as error:
            raise self._client.error(EngineTimeout, what, is_silent=is_silent) from error
        self._news.clear()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ongoing is not None:
            self._ongoing.abort()

    # what becomes of the request: a `Receiver`

    def answered(self, status: int, headers: HeaderList) -> None:
        self.status, self.headers, self.raw_headers = status, text_headers(headers), headers
        self._news.set()

    def received(self, data: bytes) -> None:
        self._pieces.append(data)
        if self._ongoing is not None and sum(map(len, self._pieces)) > _MOST_HELD_BYTES:
            self._ongoing.pause()
        self._news.set()

    def ended(self) -> None:
        self._is_complete = True
        self._news.set()

    def failed(self, error: EngineError) -> None:
        self._error = error
        self._news.set()


class Forwarded(AwaitedAnswer):
    """A request whose body is sent as it comes, while its answer may come already."""

    def __init__(
        self, client: HttpClient, begin: Callable[[Receiver], Exchange], body: AsyncIterable[bytes], *, is_chunked: bool
    ) -> None:
        """`begin`: sends the head. `is_chunked`: whether the head names no length of the body."""
        super().__init__(client, self._begin_sending)
        self._begin_exchange = begin
        self._body = body
        self._is_chunked = is_chunked
        self._sending: asyncio.Task[None] | None = None

    def _begin_sending(self, receiver: Receiver) -> Exchange:
        exchange = self._begin_exchange(receiver)
        self._sending = asyncio.get_running_loop().create_task(self._send(exchange))
        return exchange

    async def _send(self, exchange: Exchange) -> None:
        try:
            if await exchange.write(
                b""
            ):  # before any of the body is taken: a replica that cannot be reached needs none
                await self._send_body(exchange)
        except Exception:  # noqa: BLE001 (whoever gives the body knows)
            exchange.abort()
            self.failed(self._client.error(EngineGone, "did not get the whole body"))

    async def _send_body(self, exchange: Exchange) -> None:
        self._expect_answer(None)
        async for piece in self._body:
            self._expect_answer(self._client.timeouts.first_byte_s)
            if piece and not await exchange.write(chunk(piece) if self._is_chunked else piece):
                return
            self._expect_answer(None)
        self._expect_answer(self._client.timeouts.first_byte_s)
        await exchange.write(LAST_CHUNK if self._is_chunked else b"", is_last=True)

    def _expect_answer(self, within_s: float | None) -> None:
        """Let the wait for the answer end `within_s` from now; None while the body is what is waited for."""
        if not self.status:
            self._first_byte_by = None if within_s is None else asyncio.get_running_loop().time() + within_s
            self._news.set()

    def answered(self, status: int, headers: HeaderList) -> None:
        self._expect_answer(self._client.timeouts.idle_s)
        super().answered(status, headers)

    async def __aenter__(self) -> Forwarded:
        try:
            await super().__aenter__()
        except BaseException:
            self._stop_sending()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_sending()
        await super().__aexit__(kind, error, trace)

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()


def text_headers(headers: HeaderList) -> CIMultiDict[str]:
    """Return headers as text, by name in any case; bytes that are no UTF-8 survive encoding them again."""
    return CIMultiDict((name.decode(), value.decode("utf-8", "surrogateescape")) for name, value in headers)
