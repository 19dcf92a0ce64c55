"""The reservations that have not ended, and what carriers report of each. Time is an argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

from preble.errors import RequestError
from preble.reservations.leases import Leases
from preble.reservations.reservation import Reservation


class UnknownReservation(RequestError, KeyError):
    """There is no such reservation: it has ended, its lease has expired, or there never was one."""

    status = 404
    code = "reservation_not_found"
    __str__ = RequestError.__str__


class ReservationTable(Mapping[str, Reservation]):
    """Reservations by id. Each report renews the lease; each reservation ends exactly once.

    `on_over`: called once for each, after its end.
    """

    def __init__(self, on_over: Callable[[Reservation], None] = lambda reservation: None) -> None:
        self._on_over = on_over
        self._reservations: dict[str, Reservation] = {}
        self._leases = Leases()

    def __getitem__(self, reservation_id: str) -> Reservation:
        """Raises: UnknownReservation."""
        found = self._reservations.get(reservation_id)
        if found is None:
            raise UnknownReservation(f"no reservation {reservation_id[:200]!r} is held: it has ended or expired")
        return found

    def __contains__(self, reservation_id: object) -> bool:
        return reservation_id in self._reservations

    def __iter__(self) -> Iterator[str]:
        return iter(self._reservations)

    def __len__(self) -> int:
        return len(self._reservations)

    def add(self, reservation: Reservation, now: float) -> None:
        """Add the reservation of a placed request, whose id must be free."""
        assert reservation.reservation_id not in self._reservations
        self._reservations[reservation.reservation_id] = reservation
        self._leases.hold(reservation.reservation_id, now + reservation.lease_s)

    def renew(self, reservation_id: str, now: float, lease_s: float | None = None) -> Reservation:
        """The carrier lives. `lease_s`: the lease from now on, None for no other. Raises: UnknownReservation."""
        reservation = self[reservation_id]
        if lease_s is not None:
            reservation.lease_s = lease_s
        self._leases.hold(reservation_id, now + reservation.lease_s)
        return reservation

    def prefill_complete(self, reservation_id: str, now: float) -> Reservation:
        """The prompt is computed. Raises: UnknownReservation."""
        reservation = self.renew(reservation_id, now)
        reservation.prefill_complete(now)
        return reservation

    def progress(
        self, reservation_id: str, now: float, output_tokens: int, cached_tokens: int | None = None
    ) -> Reservation:
        """The tokens of the answer so far; with any, the prompt is computed. Raises: UnknownReservation."""
        reservation = self.renew(reservation_id, now)
        if output_tokens:
            reservation.prefill_complete(now)
        reservation.usage(output_tokens, cached_tokens)
        return reservation

    def end(
        self,
        reservation_id: str,
        *,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
        status: int = 200,
        error: BaseException | None = None,
        retry_after_s: float = 0.0,
    ) -> Reservation:
        """The request is over. `status`: of the replica's answer. `error`: why there is none; an `EngineError` counts
        against the replica. `output_tokens`: None for what was reported last.

        Raises: UnknownReservation: also if it ended before.
        """
        reservation = self._take(reservation_id)
        try:
            if output_tokens is not None:
                reservation.usage(output_tokens, cached_tokens)
            reservation.end(status, error, retry_after_s)
        finally:
            self._on_over(reservation)
        return reservation

    def cancel(self, reservation_id: str) -> Reservation:
        """The client has gone, or the request was never sent. Raises: UnknownReservation."""
        return self._cancelled(self._take(reservation_id))

    def expire(self, now: float) -> list[Reservation]:
        """End the reservations whose lease is over, as cancelled, and return them.

        Raises: what one of their ends raises, after the others have ended too.
        """
        expired = [self._reservations.pop(name) for name in self._leases.expire(now)]
        with ExitStack() as ends:
            for reservation in expired:
                ends.callback(self._cancelled, reservation)
        return expired

    def next_at(self) -> float | None:
        """When to call `expire` next, None if nothing is held."""
        return self._leases.next_at()

    def check(self) -> None:
        """Raises: AssertionError: a reservation has no lease, or a lease no reservation."""
        assert len(self._leases) == len(self._reservations)
        assert all(name in self._leases for name in self._reservations)

    def _cancelled(self, reservation: Reservation) -> Reservation:
        try:
            reservation.cancelled()
        finally:
            self._on_over(reservation)
        return reservation

    def _take(self, reservation_id: str) -> Reservation:
        reservation = self[reservation_id]
        del self._reservations[reservation_id]
        self._leases.release(reservation_id)
        return reservation
