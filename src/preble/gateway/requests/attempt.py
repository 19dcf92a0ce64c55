"""One try to have one replica answer a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from email.utils import parsedate_to_datetime
from types import TracebackType

from preble.core.types import ReplicaId
from preble.engines.adapter import EngineResponse
from preble.errors import AnswerTooLarge, EngineGone, EngineProtocolError
from preble.gateway.http.events import EVENT_STREAM, looks_like_events
from preble.serving import Endpoint, Placed, StreamMeter


class CancelScope:
    """A context, entered once, for work at one replica. `cancel` ends it: the work is cancelled, and leaving raises
    `EngineGone`. Use it within the task that entered it."""

    __slots__ = ("_is_open", "_reason", "_replica_id", "_scope")

    def __init__(self, replica_id: ReplicaId) -> None:
        self._replica_id = replica_id
        self._scope = asyncio.timeout(None)
        self._is_open = False
        self._reason = ""

    async def __aenter__(self) -> CancelScope:
        await self._scope.__aenter__()
        self._is_open = True
        return self

    def cancel(self, reason: str) -> None:
        """Cancel the work; nothing happens if it has not begun or is over. The error says "replica NAME `reason`"."""
        if self._is_open:
            self._is_open = False
            self._reason = reason
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as cancelled:
            raise EngineGone(
                f"replica {self._replica_id} {self._reason}", replica_id=self._replica_id, is_silent=True
            ) from cancelled
        finally:
            del self._scope  # it holds its task, whose result may hold us


class Attempt:
    """One placement, carried to its replica and back. `begin`, use the answer, then `leave`, which ends the placement.

    After `begin`, `status` and `headers` are the answer's. A stream of events (`is_stream`) has its first piece in
    `first`, which `meter` has counted, and the others in `rest()`. Other answers are whole, in `body`, and their usage
    is reported.
    """

    def __init__(self, placed: Placed, endpoint: Endpoint, max_answer_bytes: int) -> None:
        """`max_answer_bytes`: the most that a whole answer may have."""
        self.placed = placed
        self.meter: StreamMeter = endpoint.meter()
        self._endpoint = endpoint
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.first = b""
        self.body = b""
        self.is_stream = False
        self._max_answer_bytes = max_answer_bytes
        self._scope = CancelScope(placed.placement.replica_id)
        self._context: AbstractAsyncContextManager[EngineResponse] | None = None
        self._response: EngineResponse | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._has_ended = False

    async def begin(self, body: bytes, headers: Mapping[str, str], *, stream: bool) -> None:
        """Send the request. Wait for the whole answer, or for the first token of a stream.

        If it raises, the attempt has ended. Raises: EngineError. AnswerTooLarge.
        """
        self.placed.on_lost = self._on_lost
        self.placed.heard_at = self._heard_at
        await self._scope.__aenter__()
        try:
            await self._open(body, headers)
            self.is_stream = stream and self.status < 300 and (self._is_events() or not self._endpoint.by_load)
            if self.is_stream:
                await self._begin_stream()
            else:
                self.body = await self._read_all()
                self._report_usage()
        except BaseException as error:
            await self.leave(error)
            raise

    async def _open(self, body: bytes, headers: Mapping[str, str]) -> None:
        engine = self.placed.engine
        context = engine.send(self._endpoint.path, body, headers)
        self._response = response = await context.__aenter__()
        self._context = context
        if not 200 <= response.status <= 599 or 300 <= response.status <= 399:
            raise EngineProtocolError(
                f"replica {engine.replica_id} answered with status {response.status}", replica_id=engine.replica_id
            )
        self.status, self.headers = response.status, response.headers
        self._chunks = response.chunks()
        self.first = await anext(self._chunks, b"")
        # Which paths an engine has, says nothing of its models: such a 404 is no reason to check the replica.
        status = 400 if self.status == 404 and self._endpoint.by_load else self.status
        self.placed.answered(status, retry_after_s(self.headers.get("retry-after", "")))

    async def _begin_stream(self) -> None:
        """Raises: EngineProtocolError: the answer is not a stream of events, or begins with an error."""
        if not self.first:
            raise EngineProtocolError("the replica's answer is empty")
        if not self._is_events() or not looks_like_events(self.first):
            content_type = self.headers.get("content-type", "")
            raise EngineProtocolError(
                f"the replica's answer is not an event stream but {content_type[:100] or 'unnamed'!r}"
            )
        self.meter.feed(self.first)
        while not self.meter.has_begun and (chunk := await anext(self.rest(), b"")):
            self.meter.feed(chunk)
            self.first += chunk
        if (error := self.meter.error()) is not None:
            raise error

    def _is_events(self) -> bool:
        return self.headers.get("content-type", "").startswith(EVENT_STREAM.decode())

    def _report_usage(self) -> None:
        """Raises: EngineProtocolError: an answer that is said to be good is no completion."""
        if self.status < 300 and (usage := self._endpoint.usage(self.body)) is not None:
            self.placed.usage(usage.output_tokens or 0, usage.cached_tokens)

    def _on_lost(self, reason: str | None, silent_since: float | None) -> None:
        """The replica has left the rotation. If its machine is silent, so is the connection: give up waiting."""
        if silent_since is None:
            return
        heard_at = self._heard_at()
        if heard_at is None or heard_at < silent_since:
            self._scope.cancel(f"was taken out of the rotation: {reason}")

    def _heard_at(self) -> float | None:
        return self._response.heard_at if self._response is not None else None

    def rest(self) -> AsyncIterator[bytes]:
        """The body after its first piece. Raises, while being read: EngineGone, EngineTimeout."""
        return _nothing() if self._chunks is None else self._chunks

    async def _read_all(self) -> bytes:
        """Raises: EngineGone, EngineTimeout. AnswerTooLarge. EngineProtocolError: an error is too large."""
        pieces, size = [self.first], len(self.first)
        while size <= self._max_answer_bytes:
            if not (chunk := await anext(self.rest(), b"")):
                return b"".join(pieces) if len(pieces) > 1 else self.first
            pieces.append(chunk)
            size += len(chunk)
        text = f"the answer is larger than {self._max_answer_bytes} bytes"
        if self.status >= 300:  # no client asks for a long error
            raise EngineProtocolError(text)
        raise AnswerTooLarge(f"{text} (`limits.max_answer_bytes`); ask for a stream, or for less")

    async def leave(self, error: BaseException | None = None) -> None:
        """Leave the engine, which aborts work that is not done, and end the placement. A second call does nothing.

        `error`: why the carrier leaves, None if the answer was read to its end.
        Raises: EngineGone: the replica's machine fell silent meanwhile.
        """
        if self._has_ended:
            return
        self._has_ended = True
        try:
            await self._scope.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)
        except EngineGone as gone:
            error = gone
            raise
        finally:
            await self._close(error)

    async def _close(self, error: BaseException | None) -> None:
        context, self._context = self._context, None
        chunks, self._chunks = self._chunks, None
        try:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()
            if context is not None:
                await context.__aexit__(None, None, None)
        finally:
            # They hold this attempt, which holds the placement: as a circle, both would stay until a full collection.
            self.placed.on_lost, self.placed.heard_at = None, _unheard
            if error is None:
                self.placed.end()
            else:
                self.placed.failed(error)


def retry_after_s(header: str) -> float:
    """Return the seconds of a `Retry-After` header, 0 if it has none.

    >>> retry_after_s("30"), retry_after_s(""), retry_after_s("soon"), retry_after_s("Fri, 01 Jan 1999 00:00:00 GMT")
    (30.0, 0.0, 0.0, 0.0)
    """
    if header.isascii() and header.isdigit():
        return float(header[:9])
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def _unheard() -> None:
    """A placement that has ended waits for nothing."""


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""
