"""One request's way through replicas: placed, carried, and moved to another replica where that is allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol, final

from preble.core.types import Request
from preble.engines.json_fields import add_fields_after
from preble.errors import (
    EngineError,
    EngineGone,
    EngineRefused,
    EngineTimeout,
    NoReplicaError,
    Quarantined,
    RequestError,
)
from preble.gateway.requests.attempt import Attempt, Sink
from preble.gateway.requests.states import AttemptState
from preble.serving import (
    NOT_NOW,
    Intake,
    LiveReplica,
    ParsedRequest,
    Placed,
)
from preble.web.server.answering import run_until_wait


class Placing:
    """Places one request, and places it again. Where no replica takes requests, it waits for one."""

    def __init__(self, serving: Intake, request: Request, parsed: ParsedRequest) -> None:
        self._serving = serving
        self._request = request
        self._parsed = parsed
        self._tried: list[LiveReplica] = []

    async def place(self) -> Placed:
        """Raises: as `Intake.place`."""
        while True:
            try:
                return await self._serving.place(self._request, self._parsed.terms)
            except NoReplicaError:
                if not await self._serving.replica_wait.over():
                    raise

    async def place_again(self, placed: Placed, *, is_gone: bool) -> Placed:
        """Place the request on another replica than the one that failed it: `placed` has ended.

        `is_gone`: that replica refused the connection or broke off. If it was the last one, the next that comes gets
        the request, perhaps the same one after a restart. Raises: as `Placed.place_again`, and `Intake.place`.
        """
        if (tried := self._serving.replicas.get(placed.blamed)) is not None:
            self._tried.append(tried)
        try:
            return await placed.place_again()
        except NoReplicaError:
            if not is_gone or not await self._serving.replica_wait.over(self._tried):
                raise
        return await self.place()


_MOVES_AFTER_FAILURES = 1
"""How often a request moves after a replica failed while it may have worked: the request may be what makes it fail."""


class RelayOwner(Protocol):
    """Hears of one relay: `carried` or `not_carried`, once."""

    def carried(self, attempt: Attempt) -> None:
        """This attempt got an answer, which is complete."""

    def not_carried(self, error: BaseException) -> None:
        """No replica answers: the last one's failure, or a cancellation while the request was moving."""


@final
class Relay:
    """Carries one request to a replica that answers, by callbacks.

    A request moves any number of times from replicas that cannot be reached, or that answer 429 or 503. It moves once
    from a replica that fails: one that breaks off, falls silent, answers with a status of 500 or above, or with
    something that is no completion. The fleet's retry budget limits all moves, except from replicas that cannot be
    reached. After the first piece of a stream, and after a timeout, the request fails. Where no replica is left, it
    waits for one (`timeouts.no_replica_wait_s`), also after its replica has gone.
    """

    def __init__(
        self,
        serving: Intake,
        request: Request,
        parsed: ParsedRequest,
        *,
        body: bytes,
        with_ids: bytes | None,
        headers: Mapping[str, str],
        max_answer_bytes: int,
        under_way: set[Attempt],
    ) -> None:
        """`body`: for the replica. `with_ids`: the same with token ids in place of the text, if that is to be sent.
        `max_answer_bytes`: of an answer that is no stream. `under_way`: holds the attempt, while there is one."""
        self._serving = serving
        self._placing = Placing(serving, request, parsed)
        self._parsed = parsed
        self._body = body
        self._with_ids = with_ids
        self._headers = headers
        self._max_answer_bytes = max_answer_bytes
        self._under_way = under_way
        self._owner: RelayOwner
        self._sink: Sink | None = None
        self._attempt: Attempt | None = None
        self._moving: asyncio.Task[None] | None = None
        self._num_failures = 0

    async def begin(self, owner: RelayOwner, sink: Sink | None) -> None:
        """Place the request and send it. `owner` hears of the rest. `sink`: for a streamed answer, else None.

        Raises: NoReplicaError, RequestError: no replica can take it. Overloaded: its turn cannot come in time.
        """
        self._owner, self._sink = owner, sink
        if (trace := self._parsed.trace) is None:
            placed = await self._placing.place()
        else:
            loop = asyncio.get_running_loop()
            asked_at = loop.time()
            placed = await self._placing.place()
            decided_at = max(placed.placed_at, asked_at)
            trace.placed(placed.placement, decided_at - asked_at, loop.time() - decided_at)
        self._send(placed)

    @property
    def moving(self) -> asyncio.Task[None] | None:
        """The task in which the request waits for its next replica, if it does. The owner hears of a cancellation."""
        return None if self._moving is None or self._moving.done() else self._moving

    def abort(self) -> None:
        """Stop: nobody wants the answer. The owner hears nothing more, unless the request is moving."""
        if self._moving is not None:
            self._moving.cancel()
        if self._attempt is not None:
            self._attempt.abort()

    def _send(self, placed: Placed) -> None:
        parsed, headers = self._parsed, self._headers
        try:
            gaps = None if self._sink is None else self._serving.gaps(parsed)
            span = None if parsed.trace is None else parsed.trace.sent(placed.placement)
            if span is not None:
                headers = {**headers, **span.headers}
            body = self._body if self._with_ids is None else self._body_at(placed, self._with_ids)
            if (priority := self._serving.priority(parsed, placed)) is not None:
                body = add_fields_after(body, {"priority": priority})
            attempt = Attempt(
                placed,
                parsed.endpoint,
                self._max_answer_bytes,
                self._over,
                self._sink,
                self._under_way,
                gaps,
                span,
            )
        except Exception as error:
            placed.end(error)  # no attempt has begun that would end it
            raise
        self._attempt = attempt
        attempt.begin(body, headers)

    def _body_at(self, placed: Placed, with_ids: bytes) -> bytes:
        """Return the body for a replica. Since it was written, the request may have waited, or moved to a replica that
        nobody has checked: that one gets the text."""
        replica = self._serving.replicas.get(placed.placement.replica_id)
        return with_ids if replica is not None and replica.takes_ids else self._body

    # what becomes of an attempt

    def _over(self, attempt: Attempt, error: Exception | None) -> None:
        self._attempt = None
        if error is None and attempt.status < 500 and attempt.status not in NOT_NOW:
            if attempt.answer_id is not None:
                replica_id = attempt.placed.placement.replica_id
                self._serving.stored.note(attempt.answer_id, replica_id, self._parsed.caller.tenant)
            self._owner.carried(attempt)
        elif self._may_move(attempt, error):
            waiting = run_until_wait(self._move(attempt, error), asyncio.get_running_loop())
            self._moving = waiting or self._moving  # it may have moved once more by now
        else:
            self._give_up(attempt, error)

    def _may_move(self, attempt: Attempt, error: Exception | None) -> bool:
        if attempt.state is AttemptState.STREAMED or not (error is None or isinstance(error, EngineError)):
            return False
        if isinstance(error, EngineRefused) or (error is None and attempt.status in NOT_NOW):
            return True
        if isinstance(error, EngineTimeout):
            return False
        self._num_failures += 1
        return self._num_failures <= _MOVES_AFTER_FAILURES

    async def _move(self, attempt: Attempt, error: Exception | None) -> None:
        """Move as a task's root."""
        try:
            is_gone = isinstance(error, EngineRefused | EngineGone)
            self._send(await self._placing.place_again(attempt.placed, is_gone=is_gone))
        except Quarantined as refusal:
            self._owner.not_carried(refusal)
        except (NoReplicaError, RequestError):  # nobody else can take it; the client gets the failure
            self._give_up(attempt, error)
        except (Exception, asyncio.CancelledError) as failure:  # noqa: BLE001 (the client must get an answer)
            self._owner.not_carried(failure)

    def _give_up(self, attempt: Attempt, error: Exception | None) -> None:
        if error is None:
            self._owner.carried(attempt)
        else:
            self._owner.not_carried(error)
