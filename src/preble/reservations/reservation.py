"""One reservation: a request placed for a carrier that reports from elsewhere, while its lease lasts."""

from __future__ import annotations

from collections.abc import Sequence

from preble.prompts.endpoints import Fields
from preble.serving import HeldRequest, ParsedRequest, Placed


class Reservation(HeldRequest):
    """A request and its placements.

    `reservation_id`: what the carrier calls it. `lease_s`: how long it lasts without a report. `request`: its `body` is
    what the carrier sends to the replica.
    """

    def __init__(self, reservation_id: str, request: ParsedRequest, placed: Sequence[Placed], lease_s: float) -> None:
        super().__init__(placed)
        self.reservation_id = reservation_id
        self.request = request
        self.lease_s = lease_s

    def forget_prompt(self) -> None:
        """The carrier has the body: `request` keeps neither that nor the prompts any more, only the model."""
        self.request.body, self.request.fields = b"", Fields(model=self.request.model)
