"""One request's way through replicas: placed, carried, and moved to another replica where that is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from preble.core.types import Request
from preble.errors import EngineError, EngineRefused, EngineTimeout, NoReplicaError, RequestError
from preble.gateway.requests.attempt import Attempt
from preble.serving import NOT_NOW, Intake, ParsedRequest

_MOVES_AFTER_FAILURES = 1
"""How often a request moves after a replica failed while it may have worked: the request may be what makes it fail."""


class Relay:
    """Carries one request to a replica that answers. Enter it to get the attempt with the answer; leaving ends that.

    Leaving before the end of the answer aborts the work in the engine.

    A request leaves a replica that cannot be reached, or that says 429 or 503, for any number of others. It leaves a
    replica that fails for one other: one that breaks off, falls silent, answers with a status of 500 or above, or with
    something that is no completion. Both stay within the fleet's retry budget. After the first piece of a stream, and
    after a timeout, the request fails.
    """

    def __init__(
        self,
        serving: Intake,
        request: Request,
        parsed: ParsedRequest,
        body: bytes,
        headers: Mapping[str, str],
        *,
        stream: bool,
        max_answer_bytes: int,
    ) -> None:
        """`max_answer_bytes`: of an answer that is no stream."""
        self._serving = serving
        self._request = request
        self._parsed = parsed
        self._sent = (body, headers)
        self._stream = stream
        self._max_answer_bytes = max_answer_bytes
        self._attempt: Attempt | None = None
        self._num_failures = 0

    async def __aenter__(self) -> Attempt:
        """Raises: NoReplicaError, RequestError: no replica can take it. EngineError: the last replica's failure."""
        placed = await self._serving.place(self._request, self._parsed)
        while True:
            self._attempt = attempt = Attempt(placed, self._parsed.endpoint, self._max_answer_bytes)
            failure: EngineError | None = None
            try:
                await attempt.begin(*self._sent, stream=self._stream)
                if attempt.status < 500 and attempt.status not in NOT_NOW:
                    return attempt
                await attempt.leave()
            except EngineError as error:
                failure = error
            if self._may_move(attempt, failure):
                try:
                    placed = await placed.place_again()
                    continue
                except (NoReplicaError, RequestError):  # nobody else can take it; the client gets the failure
                    pass
            if failure is not None:
                raise failure
            return attempt

    def _may_move(self, attempt: Attempt, failure: EngineError | None) -> bool:
        if isinstance(failure, EngineRefused) or (failure is None and attempt.status in NOT_NOW):
            return True
        if isinstance(failure, EngineTimeout):
            return False
        self._num_failures += 1
        return self._num_failures <= _MOVES_AFTER_FAILURES

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises: EngineGone: the replica's machine fell silent during the answer."""
        if self._attempt is not None:
            await self._attempt.leave(error)
