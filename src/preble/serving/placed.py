"""One placement as the carrier of its bytes sees it."""

from __future__ import annotations

import asyncio
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from preble.core.types import Placement, ReplicaId, Request
from preble.core.types.life import (
    LONGEST_S,
    TRANSFER_FAILED,
    Ended,
    FirstToken,
    Lost,
    Moved,
    Outcome,
    Progress,
    Report,
    TransferFailed,
)
from preble.engines import Engine
from preble.engines.pairs import PairedEngine
from preble.errors import (
    EngineError,
    EngineFailed,
    EngineGone,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    RequestError,
)
from preble.serving.terms import Terms

if TYPE_CHECKING:
    from preble.serving.placements import Placements

NOT_NOW = frozenset({429, 503})
"""Statuses with which a replica refuses work that another may take."""
_OUTCOMES = MappingProxyType(
    {
        asyncio.CancelledError: Outcome.ABORTED,
        TimeoutError: Outcome.ABORTED,
        EngineRefused: Outcome.ENGINE_REFUSED,
        EngineGone: Outcome.ENGINE_GONE,
        EngineFailed: Outcome.ENGINE_FAILED,
        EngineTimeout: Outcome.ENGINE_TIMEOUT,
        EngineProtocolError: Outcome.ENGINE_PROTOCOL_ERROR,
        EngineError: Outcome.ENGINE_FAILED,
        RequestError: Outcome.REQUEST_ERROR,
    }
)
_WELL = Ended()


class Carrier(Protocol):
    """Who carries the bytes of a placement."""

    def lost(self, loss: Lost) -> None:
        """The replica has left the rotation before the placement's end, or is ejected because it begins no answer. In
        the second case a placement whose answer is not streamed hears of it from the second ejection on."""

    @property
    def heard_at(self) -> float | None:
        """When anything of the answer last came, by the event loop's clock; None if nothing has."""


class Placed(ABC):
    """One placement, from `Intake.place` to its end. The carrier of the bytes reports what happens to the request.

    Exactly one end counts, the first. What is reported after it changes nothing. `placement`: the replica, and why.
    `placed_at`: when, by the event loop's clock. `engine`: the client of that replica, or of the two where another one
    computes the prompt. `progress`: as last reported. `blamed`: the replica that a failure is laid to.
    """

    __slots__ = ("_carrier", "_has_ended", "_loss", "blamed", "engine", "placed_at", "placement", "progress")

    def __init__(self, placement: Placement, engine: Engine, placed_at: float) -> None:
        self.placement = placement
        self.engine = engine
        self.placed_at = placed_at
        self.progress = Progress()
        self._carrier: Carrier | None = None
        self._loss: Lost | None = None
        self._has_ended = False
        self.blamed = placement.replica_id

    def carried_by(self, carrier: Carrier) -> None:
        """Let the carrier hear if the replica leaves, at once if it has left, and ask when it heard of the replica.

        Ends with the placement.
        """
        self._carrier = carrier
        if self.placement.prefill_source is not None:
            if isinstance(self.engine, PairedEngine):
                self.engine.report = self.report
            else:
                self.report(TRANSFER_FAILED)  # the source rests
        if self._loss is not None:
            carrier.lost(self._loss)

    def heard_at(self) -> float | None:
        """Return when the carrier last heard of the replica; see `Carrier`."""
        return None if self._carrier is None else self._carrier.heard_at

    def lose(self, loss: Lost) -> None:
        """Tell the carrier that the replica has left, or begins no answer; or the pair that its source has left."""
        self._loss = loss
        if loss.of_source and isinstance(self.engine, PairedEngine):
            self.engine.lose_source(loss.reason)
        if self._carrier is not None:
            self._carrier.lost(loss)

    def report(self, fact: Report) -> None:
        """Take what the carrier has seen. Raises: NoReplicaError: the request moved to a replica that is not live."""
        if self._has_ended:
            return
        if isinstance(fact, Progress):
            self.progress = fact
            return
        if isinstance(fact, FirstToken) and isinstance(self.engine, PairedEngine):
            self.engine.kept_until = 0.0  # it was fetched
        if isinstance(fact, Ended):
            self._has_ended = True
            self._carrier = None  # it refers to this placement: only a full collection would free the cycle
            kept_s = 0.0
            if isinstance(self.engine, PairedEngine):
                self.engine.report = None
                kept_s = self.engine.kept_s()
            if fact.output_tokens is None:
                progress = self.progress
                fact = Ended(
                    fact.outcome,
                    fact.status,
                    fact.retry_after_s,
                    progress.output_tokens,
                    progress.cached_tokens,
                    fact.text,
                    fact.failed or self.engine.failed_leg,
                )
            self.blamed = fact.failed or self.placement.replica_id
            unfetched = fact.outcome.blames_replica or fact.outcome is Outcome.REFUSED
            if kept_s and unfetched and not fact.failed:
                self._take(TransferFailed(kept_s=kept_s))
        self._take(fact)

    def end(self, error: BaseException | None = None, *, status: int = 200, retry_after_s: float = 0.0) -> None:
        """Report the end: see `ended`."""
        self.report(_WELL if error is None and status < 300 else ended(error, status, retry_after_s))

    def asked_alone(self) -> None:
        """The carrier asks the replica alone: another one that was to compute the prompt does not."""
        if self.placement.prefill_source is not None:
            self.report(TRANSFER_FAILED)

    def cancelled(self) -> None:
        """The client has gone, or the work was stopped for another reason that is not the replica's."""
        self.report(Ended(Outcome.ABORTED))

    @abstractmethod
    async def place_again(self) -> Placed:
        """Place the request on a replica that it has not tried. Call it after the end of this placement.

        Only a request whose replica could not be reached is outside the fleet's retry budget.
        Raises: NoReplicaError: there is none, or the budget is spent. PromptTooLong, UnknownModel.
        """

    @abstractmethod
    def _take(self, fact: Report) -> None:
        """Pass a fact on. The end comes last, and once."""


class LocalPlaced(Placed):
    """A placement in the process that has the scheduler.

    `request`, `terms`: of whom it is. `model`: as metrics name it. `arrived_at`: when the request had arrived.
    `begun_at`: when its first token came, None before. `is_lost`: its replica has left the rotation, so the scheduler
    has forgotten it. `stalls`: its replica is ejected because it begins no answer. `transfer_failed`: so its replica
    has computed all itself.
    """

    __slots__ = (
        "_may_retry_freely",
        "_place_again",
        "_table",
        "arrived_at",
        "begun_at",
        "is_lost",
        "model",
        "request",
        "stalls",
        "terms",
        "transfer_failed",
    )

    def __init__(
        self,
        placement: Placement,
        engine: Engine,
        placed_at: float,
        *,
        request: Request,
        terms: Terms,
        model: str,
        table: Placements,
        place_again: Callable[[Request, Terms, ReplicaId, bool], LocalPlaced],
    ) -> None:
        super().__init__(placement, engine, placed_at)
        self.request = request
        self.terms = terms
        self.model = model
        self.arrived_at = placed_at if terms.arrived_at is None else min(terms.arrived_at, placed_at)
        self.begun_at: float | None = None
        self.is_lost = self.stalls = self.transfer_failed = False
        self._table = table
        self._place_again = place_again
        self._may_retry_freely = False

    def stall(self, now: float) -> None:
        """The replica is ejected because it begins no answer."""
        self.stalls = True
        self.lose(Lost("it begins no answer", now))

    def leave(self, loss: Lost) -> None:
        """The replica has left the rotation."""
        self.is_lost = True
        try:
            self._table.tell(self, loss)
        finally:
            self.lose(loss)

    async def place_again(self) -> LocalPlaced:
        return await self._table.copies.carry_out(self.placed_again())

    def placed_again(self) -> LocalPlaced:
        """Do as `place_again`, at once."""
        return self._place_again(self.request, self.terms, self.blamed, self._may_retry_freely)

    def _take(self, fact: Report) -> None:
        if isinstance(fact, Ended):
            self._may_retry_freely = fact.outcome is Outcome.ENGINE_REFUSED
        elif isinstance(fact, FirstToken):
            self.begun_at = self._table.loop.time()
        elif isinstance(fact, TransferFailed):
            self.transfer_failed = True
        elif isinstance(fact, Moved):
            self.engine = self._table.replicas.engine(fact.replica_id)
            fact = Moved(fact.replica_id, self.placement.replica_id)
            self.placement = dataclasses.replace(
                self.placement,
                replica_id=fact.replica_id,
                transfer=None,
                predicted_ttft_s=None,
                predicted_ttft_p98_s=None,
                predicted_tpot_s=None,
                predicted_tpot_p98_s=None,
            )
        self._table.tell(self, fact)


def engine_for(placement: Placement, engine_of: Callable[[ReplicaId], Engine]) -> Engine:
    """Return the client that carries a placement out: of two replicas where one computes the prompt for the other.

    Raises: NoReplicaError: one of them has left.
    """
    engine = engine_of(placement.replica_id)
    source = placement.prefill_source
    return engine if source is None else engine.paired(engine_of(source)) or engine


def ended(error: BaseException | None = None, status: int = 200, retry_after_s: float = 0.0) -> Ended:
    """Return the end of a placement: well, or with an error, or with an answer of this HTTP status.

    `retry_after_s`: from the answer's `Retry-After` header. An `EngineError` counts against the replica.
    """
    retry_after_s = min(retry_after_s, LONGEST_S)  # by the replica's word
    if error is not None:
        kinds = (outcome for kind, outcome in _OUTCOMES.items() if isinstance(error, kind))
        return Ended(next(kinds, Outcome.ERROR), status, retry_after_s, text=str(error))
    if status < 300:
        return _WELL
    if status in NOT_NOW:
        return Ended(Outcome.REFUSED, status, retry_after_s)
    if status < 500:
        return Ended(Outcome.REJECTED, status, retry_after_s)
    return Ended(Outcome.ENGINE_FAILED, status, retry_after_s, text=f"the replica answered with status {status}")


def share_usage(placed: Sequence[Placed], output_tokens: int, cached_tokens: int | None) -> None:
    """Report the tokens so far of one answer to a list of prompts.

    The prompts share the output tokens evenly; which of several hit the cache is unknown.
    """
    count = len(placed)
    for index, one in enumerate(placed):
        one.report(Progress((output_tokens + index) // count, cached_tokens if count == 1 else None))
