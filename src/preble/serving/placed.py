"""One placement as the carrier of its bytes sees it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from preble.core.types import Placement, ReplicaId
from preble.engines import Engine

NOT_NOW = frozenset({429, 503})
"""Statuses with which a replica refuses work that another may take."""


class Placed(ABC):
    """One placement, from `Intake.place` to its end. The carrier of the bytes reports what happens to the request.

    Exactly one end counts: the first of `end`, `failed` and `cancelled`. Later ones change nothing.

    `placement`: the replica, and why. `placed_at`: when, by the event loop's clock. `engine`: the client of that
    replica. `on_lost`: called once if the replica leaves the rotation before the end, with the reason and the time
    since when its machine has been silent. That time is None if the machine still answers or refuses: connections to it
    then break by themselves. It is also called if the replica is ejected because it begins no answer; for an answer
    that is not streamed, only from the second ejection on. `heard_at`: called now and then; returns when anything of
    the answer last came, by the event loop's clock, None if nothing has.
    """

    __slots__ = (
        "_cached_tokens",
        "_has_ended",
        "_output_tokens",
        "_retry_after_s",
        "_status",
        "engine",
        "heard_at",
        "on_lost",
        "placed_at",
        "placement",
    )

    def __init__(self, placement: Placement, engine: Engine, placed_at: float) -> None:
        self.placement = placement
        self.engine = engine
        self.placed_at = placed_at
        self.on_lost: Callable[[str | None, float | None], None] | None = None
        self.heard_at: Callable[[], float | None] = _unheard
        self._output_tokens = 0
        self._cached_tokens: int | None = None
        self._has_ended = False
        self._status = 200
        self._retry_after_s = 0.0

    def answered(self, status: int, retry_after_s: float = 0.0) -> None:
        """The replica has begun its answer with this HTTP status. `retry_after_s`: from its `Retry-After` header."""
        self._status = status
        self._retry_after_s = retry_after_s

    @abstractmethod
    def first_token(self) -> None:
        """The first token of a streamed answer has arrived: the prefill is over."""

    def usage(self, output_tokens: int, cached_tokens: int | None = None) -> None:
        """The tokens so far: generated, and cached by the replica (None if not reported). The last call counts."""
        self._output_tokens = output_tokens
        self._cached_tokens = cached_tokens

    @property
    def output_tokens(self) -> int:
        """As last reported."""
        return self._output_tokens

    @abstractmethod
    def moved(self, to: ReplicaId) -> None:
        """The carrier has sent the request to another replica. Raises: NoReplicaError: that one is not live."""

    def end(self) -> None:
        """The answer is complete. With an error status it is no success: see `answered`."""
        self._end_once(None)

    def cancelled(self) -> None:
        """The client has gone, or the work was stopped for another reason that is not the replica's."""
        self._end_once(asyncio.CancelledError())

    def failed(self, error: BaseException) -> None:
        """The request failed. An `EngineError` also counts as the replica's failure and has it checked at once."""
        self._end_once(error)

    @abstractmethod
    async def place_again(self) -> Placed:
        """Place the request on a replica that it has not tried. Call it after the end of this placement.

        Only a request whose replica could not be reached is outside the fleet's retry budget.
        Raises: NoReplicaError: there is none, or the budget is spent. PromptTooLong, UnknownModel.
        """

    def _end_once(self, error: BaseException | None) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._over(error)

    @abstractmethod
    def _over(self, error: BaseException | None) -> None:
        """The placement has ended, with this error if not well. Called once."""


def share_usage(placed: Sequence[Placed], output_tokens: int, cached_tokens: int | None) -> None:
    """Report the tokens so far of one answer to a list of prompts.

    The prompts share the output tokens evenly; which of several hit the cache is unknown.
    """
    count = len(placed)
    for index, one in enumerate(placed):
        one.usage((output_tokens + index) // count, cached_tokens if count == 1 else None)


def _unheard() -> None:
    """Nothing has come yet."""
