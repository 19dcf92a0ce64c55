"""Reservations: each one, and those that have not ended with what carriers report of them. Time is an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from preble.core.types.life import Alive, Ended, Outcome, Report
from preble.errors import RequestError
from preble.prompts.endpoints import Fields
from preble.reservations.leases import Leases
from preble.serving import HeldPlacements, HeldRequest, ParsedRequest, Placed


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
        self.request.body, self.request.fields = b"", Fields(model=self.request.fields.model)


class UnknownReservation(RequestError, KeyError):
    """There is no such reservation: it has ended, its lease has expired, or there never was one."""

    status = 404
    code = "reservation_not_found"
    __str__ = RequestError.__str__


class ReservationTable(HeldPlacements[str, Reservation]):
    """Reservations by id, each with a lease. Every report renews it; one that is not renewed ends the reservation."""

    def __init__(self, on_over: Callable[[Reservation, Ended], None] = lambda reservation, end: None) -> None:
        super().__init__(on_over)
        self._leases = Leases()

    def __getitem__(self, reservation_id: str) -> Reservation:
        """Raises: UnknownReservation."""
        if reservation_id not in self:
            raise UnknownReservation(f"no reservation {reservation_id[:200]!r} is held: it has ended or expired")
        return super().__getitem__(reservation_id)

    def add(self, reservation: Reservation, now: float) -> None:
        """Add the reservation of a placed request, whose id must be free."""
        self.hold(reservation.reservation_id, reservation)
        self._leases.hold(reservation.reservation_id, now + reservation.lease_s)

    def report(self, name: str, fact: Report, now: float) -> Reservation:
        """Take what a carrier reports. Raises: UnknownReservation. As `HeldRequest.report`."""
        reservation = self[name]
        if isinstance(fact, Ended):
            self._leases.release(name)
        else:
            if isinstance(fact, Alive) and fact.lease_s is not None:
                reservation.lease_s = fact.lease_s
            self._leases.hold(name, now + reservation.lease_s)
        return super().report(name, fact, now)

    def cancel(self, reservation_id: str) -> Reservation:
        """End a request whose client has gone, or the request was never sent. Raises: UnknownReservation."""
        return self.report(reservation_id, Ended(Outcome.ABORTED), 0.0)

    def expire(self, now: float) -> list[Reservation]:
        """End the reservations whose lease is over, as cancelled, and return them.

        Raises: what one of their ends raises, after the others have ended too.
        """
        expired = [self[name] for name in self._leases.expire(now)]
        with ExitStack() as ends:
            for reservation in expired:
                ends.callback(super().report, reservation.reservation_id, Ended(Outcome.ABORTED), now)
        return expired

    def next_at(self) -> float | None:
        """Return when to call `expire` next, None if nothing is held."""
        return self._leases.next_at()

    def check(self) -> None:
        """Raises: AssertionError: a reservation has no lease, or a lease no reservation."""
        assert len(self._leases) == len(self)
        assert all(name in self._leases for name in self)
