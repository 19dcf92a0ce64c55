"""One request's way through replicas: placed, sent, moved where that is allowed, and ended exactly once."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType

from preble.core.types import Request
from preble.engines.adapter import EngineResponse
from preble.errors import (
    EngineError,
    EngineGone,
    EngineProtocolError,
    EngineRefused,
    NoReplicaError,
    PrebleError,
)
from preble.serving.dispatcher import Attempt, Dispatcher
from preble.serving.telemetry.metrics import Telemetry

NOT_NOW = frozenset({429, 503})
"""Statuses with which a replica refuses work that another may take."""

_NOT_FOUND = 404
_MOVES_AFTER_BREAKS = 1
"""How often a request moves whose replica broke off while it may have worked: the request may be what breaks them."""


@dataclass(slots=True)
class ResponseHead:
    """Status and headers of an answer, with the first piece of its body."""

    status: int
    headers: Mapping[str, str]
    first: bytes


class Relay:
    """Carries one request to a replica that answers. Enter to get the answer's head and first bytes; leave to end it.

    Leaving before the body's end aborts the work in the engine. On every way out the scheduler learns that the request
    has ended, once for each time that it was placed.

    A replica that cannot be reached, or says 429 or 503, is left for any number of others; one that breaks off before
    the first byte, or is taken out of the rotation since its machine is silent, for one other; later, or where it took
    too long, the request fails.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        telemetry: Telemetry,
        request: Request,
        model: str | None,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        max_answer_bytes: int,
    ) -> None:
        """`max_answer_bytes`: of an answer that is read whole."""
        self._dispatcher = dispatcher
        self._telemetry = telemetry
        self._request = request
        self._model = model
        self._sent = (path, body, headers)
        self._max_answer_bytes = max_answer_bytes
        self._context: AbstractAsyncContextManager[EngineResponse] | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._refusal: ResponseHead | None = None
        self._failure: EngineError | None = None
        self._breaks = 0
        self._call: Attempt | None = None
        self.placed: Attempt | None = None
        """The last placement, also after the end."""
        self.output_tokens = 0
        """To be set by the one who reads the answer."""
        self.cached_tokens: int | None = None
        """To be set by the one who reads the answer."""

    async def __aenter__(self) -> ResponseHead:
        """Raises: NoReplicaError, RequestError: nobody can take it. EngineError: the last replica's failure."""
        while True:
            try:
                call = self._place()
            except NoReplicaError:
                if self._refusal is not None:
                    return self._refusal
                raise (self._failure or NoReplicaError("no replica is up")) from self._failure
            head = await self._try(call)
            if head is not None:
                return head
            self._request = dataclasses.replace(self._request, avoid=self._request.avoid | {call.placement.replica_id})
            self._telemetry.moves.labels(call.placement.replica_id).inc()

    def _place(self) -> Attempt:
        self._call = self.placed = self._dispatcher.place(self._request, self._model)
        return self._call

    async def _try(self, call: Attempt) -> ResponseHead | None:
        """The answer of one replica, or None if another should be asked; then this call has ended."""
        try:
            head = await self._begin(call)
            if head.status == _NOT_FOUND:
                self._dispatcher.suspect(call.placement.replica_id)  # perhaps it serves another model by now
            if head.status not in NOT_NOW:
                return head
            await self._leave("refused")
            return None
        except EngineError as error:
            self._note(call, error)
            await self._leave(type(error).__name__)
            if not self._may_move(error):
                raise
            self._failure = error
            return None
        except BaseException as error:
            await self._leave(_outcome(error))
            raise

    async def _begin(self, call: Attempt) -> ResponseHead:
        """Get the head of the answer. Its cancel scope stays open, except for a refusal, which is read whole."""
        await call.cancel_scope.__aenter__()
        try:
            head = await self._open(call)
            if head.status not in NOT_NOW:
                return head
            head = self._refusal = await self._whole(head)
        except BaseException as error:
            await call.cancel_scope.__aexit__(type(error), error, error.__traceback__)
            raise
        await call.cancel_scope.__aexit__(None, None, None)
        return head

    async def _open(self, call: Attempt) -> ResponseHead:
        context = call.engine.send(*self._sent)
        call.response = response = await context.__aenter__()
        self._context = context
        if not 200 <= response.status <= 599 or 300 <= response.status <= 399:
            raise EngineProtocolError(
                f"replica {call.placement.replica_id} answered with status {response.status}",
                replica_id=call.placement.replica_id,
            )
        self._chunks = response.chunks()
        first = await anext(self._chunks, b"")
        return ResponseHead(response.status, response.headers, first)

    async def _whole(self, head: ResponseHead) -> ResponseHead:
        return dataclasses.replace(head, first=await self.read_all(head))

    def _may_move(self, error: EngineError) -> bool:
        if isinstance(error, EngineRefused):
            return True
        if isinstance(error, EngineGone):
            self._breaks += 1
            return self._breaks <= _MOVES_AFTER_BREAKS
        return False

    def _note(self, call: Attempt, error: EngineError) -> None:
        self._telemetry.engine_failed(call.placement.replica_id, error)
        self._dispatcher.suspect(call.placement.replica_id)

    def rest(self) -> AsyncIterator[bytes]:
        """The body after the first piece. Raises, while being read: EngineGone, EngineTimeout."""
        return _nothing() if self._chunks is None else self._chunks

    async def read_all(self, head: ResponseHead) -> bytes:
        """The whole body. Raises: EngineGone, EngineTimeout. EngineProtocolError: it is larger than is accepted."""
        pieces = [head.first]
        size = len(head.first)
        async for chunk in self.rest():
            pieces.append(chunk)
            size += len(chunk)
            if size > self._max_answer_bytes:
                raise EngineProtocolError(f"the replica's answer is larger than {self._max_answer_bytes} bytes")
        return b"".join(pieces) if len(pieces) > 1 else head.first

    def first_token(self) -> None:
        """Tell the scheduler that the engine has begun to generate."""
        if self._call is not None:
            self._dispatcher.first_token(self._call)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises: EngineGone: the replica was taken out of the rotation, and the request withdrawn from it."""
        call = self._call
        try:
            if call is not None:
                await call.cancel_scope.__aexit__(kind, error, trace)
        except EngineGone as withdrawn:
            error = withdrawn
            raise
        finally:
            if isinstance(error, EngineError) and call is not None:
                self._note(call, error)
            await self._leave("ok" if error is None else _outcome(error))

    async def _leave(self, outcome: str) -> None:
        """End the engine's work and the call, whatever happens meanwhile."""
        context, self._context = self._context, None
        chunks, self._chunks = self._chunks, None
        call, self._call = self._call, None
        try:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()
            if context is not None:
                await context.__aexit__(None, None, None)
        finally:
            if call is not None:
                self._dispatcher.finish(call, outcome, self.output_tokens, self.cached_tokens)


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


def _outcome(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "aborted"
    return type(error).__name__ if isinstance(error, (PrebleError, TimeoutError)) else "error"
