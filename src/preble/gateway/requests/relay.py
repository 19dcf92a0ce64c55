"""One request's way through replicas: placed, carried, and moved to another replica where that is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from preble.core.types import Request
from preble.errors import EngineError, EngineGone, EngineRefused, NoReplicaError
from preble.gateway.requests.attempt import Attempt
from preble.serving import Serving

_MOVES_AFTER_BREAKS = 1
"""How often a request moves after a replica broke off while it may have worked: the request may be what breaks them."""


class Relay:
    """Carries one request to a replica that answers. Enter it to get the attempt with the answer; leaving ends that.

    Leaving before the end of the answer aborts the work in the engine.

    A request leaves a replica that cannot be reached, or that says 429 or 503, for any number of others. It leaves a
    replica that breaks off before the first byte, or whose machine falls silent, for one other. After the first byte,
    and after a timeout, the request fails.
    """

    def __init__(
        self,
        serving: Serving,
        request: Request,
        model: str | None,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        max_answer_bytes: int,
    ) -> None:
        """`max_answer_bytes`: of an answer that is read whole."""
        self._serving = serving
        self._request = request
        self._model = model
        self._sent = (path, body, headers)
        self._max_answer_bytes = max_answer_bytes
        self._attempt: Attempt | None = None
        self._refusal: Attempt | None = None
        self._failure: EngineError | None = None
        self._breaks = 0

    async def __aenter__(self) -> Attempt:
        """Raises: NoReplicaError, RequestError: no replica can take it. EngineError: the last replica's failure."""
        placed = self._serving.place(self._request, self._model)
        while True:
            self._attempt = attempt = Attempt(placed, self._max_answer_bytes)
            if await self._is_answered(attempt):
                return attempt
            try:
                placed = placed.place_again()
            except NoReplicaError:
                if self._refusal is not None:
                    return self._refusal
                assert self._failure is not None
                raise self._failure from None

    async def _is_answered(self, attempt: Attempt) -> bool:
        """Try one replica; return whether its answer is the client's, rather than another replica's.

        Raises: EngineError: the replica failed, and no other may be tried.
        """
        try:
            await attempt.begin(*self._sent)
        except EngineError as error:
            if not self._may_move(error):
                raise
            self._failure = error
            return False
        if attempt.is_refusal:
            self._refusal = attempt
        return not attempt.is_refusal

    def _may_move(self, error: EngineError) -> bool:
        if isinstance(error, EngineRefused):
            return True
        if isinstance(error, EngineGone):
            self._breaks += 1
            return self._breaks <= _MOVES_AFTER_BREAKS
        return False

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises: EngineGone: the replica's machine fell silent during the answer."""
        if self._attempt is not None:
            await self._attempt.leave(error)
