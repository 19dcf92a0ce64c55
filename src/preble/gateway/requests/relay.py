"""One request's way through replicas: placed, carried, and moved to another replica where that is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from preble.core.types import Request
from preble.errors import EngineError, EngineRefused, EngineTimeout, NoReplicaError, RequestError
from preble.gateway.requests.attempt import Attempt, Sink
from preble.gateway.requests.tracing import place, replica_span
from preble.serving import NOT_NOW, Intake, ParsedRequest, Placed

_MOVES_AFTER_FAILURES = 1
"""How often a request moves after a replica failed while it may have worked: the request may be what makes it fail."""


@dataclass(slots=True)
class Relay:
    """Carries one request to a replica that answers.

    A request moves any number of times from replicas that cannot be reached, or that answer 429 or 503. It moves once
    from a replica that fails: one that breaks off, falls silent, answers with a status of 500 or above, or with
    something that is no completion. The fleet's retry budget limits all moves, except from replicas that cannot be
    reached. After the first piece of a stream, and after a timeout, the request fails.

    `with_ids`: the same body with token ids in place of the text, if that is to be sent. `max_answer_bytes`: of an
    answer that is no stream. `under_way`: holds the attempt, while there is one.
    """

    serving: Intake
    request: Request
    parsed: ParsedRequest
    body: bytes
    with_ids: bytes | None
    headers: Mapping[str, str]
    max_answer_bytes: int
    under_way: set[Attempt]
    num_failures: int = 0

    async def carry(self, sink: Sink | None) -> Attempt:
        """Return the attempt that got an answer, once the answer is complete. `sink`: for a streamed answer.

        Raises: NoReplicaError, RequestError: no replica can take it. EngineError: the last replica's failure.
        """
        placed = await place(self.serving, self.request, self.parsed)
        while True:
            attempt = Attempt(placed, self.parsed.endpoint, self.max_answer_bytes, sink)
            failure: EngineError | None = None
            try:
                body = self.body if self.with_ids is None else self._body_at(placed, self.with_ids)
                if (trace := self.parsed.trace) is None:
                    await attempt.carry(body, self.headers, self.under_way)
                else:
                    with replica_span(trace, attempt, self.headers) as headers:
                        await attempt.carry(body, headers, self.under_way)
                if attempt.status < 500 and attempt.status not in NOT_NOW:
                    if attempt.answer_id is not None:
                        tenant = self.parsed.caller.tenant
                        self.serving.stored.note(attempt.answer_id, attempt.placed.placement.replica_id, tenant)
                    return attempt
            except EngineError as error:
                if attempt.has_begun:
                    raise
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

    def _body_at(self, placed: Placed, with_ids: bytes) -> bytes:
        """Return the body for a replica. Since it was written, the request may have waited, or moved to a replica that
        nobody has checked: that one gets the text."""
        replica = self.serving.replicas.get(placed.placement.replica_id)
        return with_ids if replica is not None and replica.takes_ids else self.body

    def _may_move(self, attempt: Attempt, failure: EngineError | None) -> bool:
        if isinstance(failure, EngineRefused) or (failure is None and attempt.status in NOT_NOW):
            return True
        if isinstance(failure, EngineTimeout):
            return False
        self.num_failures += 1
        return self.num_failures <= _MOVES_AFTER_FAILURES
