"""One reservation: a request placed for a carrier that reports from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from preble.core.types import Placement, ReplicaId
from preble.engines import Engine
from preble.prompts.endpoints import Fields
from preble.serving import ParsedRequest, Placed, share_usage


class Reservation:
    """A request and its placements, of which a list of prompts has several, all on one replica.

    `reservation_id`: what the carrier calls it. `lease_s`: how long it lasts without a report. `request`: its `body` is
    what the carrier sends to the replica. `lost`: why the replica has left the rotation; None while it is there. The
    answer may still arrive then.
    """

    def __init__(self, reservation_id: str, request: ParsedRequest, placed: Sequence[Placed], lease_s: float) -> None:
        self.reservation_id = reservation_id
        self.request = request
        self.lease_s = lease_s
        self.lost: str | None = None
        self._placed = placed
        self._heard_at: float | None = None
        for one in placed:
            one.on_lost = self._on_lost
            one.heard_at = lambda: self._heard_at

    @property
    def placement(self) -> Placement:
        """Where the request goes, and why."""
        return self._placed[0].placement

    @property
    def engine(self) -> Engine:
        """The client of that replica: its URL, its data-parallel rank."""
        return self._placed[0].engine

    def forget_prompt(self) -> None:
        """The carrier has the body: `request` keeps neither that nor the prompts any more, only the model."""
        self.request.body, self.request.fields = b"", Fields(model=self.request.model)

    @property
    def output_tokens(self) -> int:
        """As last reported."""
        return sum(one.output_tokens for one in self._placed)

    def _on_lost(self, reason: str | None, silent_since: float | None) -> None:
        self.lost = reason or "it has left"

    @property
    def has_begun(self) -> bool:
        """Whether the prompt is computed."""
        return self._heard_at is not None

    def prefill_complete(self, now: float) -> None:
        """The prompt is computed, or more of the answer has come."""
        if not self.has_begun:
            for one in self._placed:
                one.first_token()
        self._heard_at = now

    def moved(self, to: ReplicaId) -> None:
        """The carrier sent the request to another replica. Raises: NoReplicaError: that one is not live."""
        for one in self._placed:
            if one.placement.replica_id != to:
                one.moved(to)

    def usage(self, output_tokens: int, cached_tokens: int | None = None) -> None:
        """The tokens so far. Several prompts share the output tokens evenly; which one hit the cache is unknown."""
        share_usage(self._placed, output_tokens, cached_tokens)

    def end(self, status: int, error: BaseException | None, retry_after_s: float = 0.0) -> None:
        """It is over: well, or with an error. `status`: of the replica's answer, with its `Retry-After`."""
        for one in self._placed:
            one.answered(status, retry_after_s)
            if error is not None:
                one.failed(error)
            one.end()

    def cancelled(self) -> None:
        """It is over: the client has gone, or the carrier reports nothing any more."""
        for one in self._placed:
            one.cancelled()
