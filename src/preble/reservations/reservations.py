"""Reservations on a running serving room: requests are placed, and leases expire by the event loop's clock."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

import structlog

from preble.core.types import ReplicaId
from preble.core.types.life import Ended, Outcome, Report
from preble.errors import NoReplicaError, RequestError
from preble.prompts.endpoints import Endpoint, Fields
from preble.reservations.table import Reservation, ReservationTable
from preble.rules.callers import ANYBODY, Caller
from preble.serving import Intake

LONGEST_LEASE_S = 3600.0
_SANE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class ReservationHeld(RequestError):
    """Another reservation of this id is held."""

    status = 409
    code = "reservation_held"


class Reservations(ReservationTable):
    """The reservations of one serving room. Use it within the event loop that started the serving room.

    `lease_s`: how long a reservation lasts without a report, unless its carrier asks for another time. `now`, which
    reports take, is the event loop's time.

    ```
    reservations = Reservations(serving)
    held = await reservations.reserve(COMPLETIONS, headers, body)
    ...  # somebody sends held.request.body to held.engine.url
    reservations.report(held.reservation_id, FirstToken(), loop.time())
    reservations.report(held.reservation_id, Ended(output_tokens=12), loop.time())
    await reservations.close()
    ```
    """

    def __init__(self, serving: Intake, lease_s: float = 300.0) -> None:
        super().__init__(self._release)
        self.lease_s = lease_s
        self.num_expired = 0
        self._serving = serving
        self._loop = asyncio.get_running_loop()
        self._stacks: dict[str, AsyncExitStack] = {}
        """What is given back for every id in use. One is in use from before its request is placed."""
        self._is_closed = False
        self._closing: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def reserve(
        self,
        endpoint: Endpoint,
        headers: Mapping[bytes, bytes],
        body: bytes | Fields,
        caller: Caller = ANYBODY,
        *,
        reservation_id: str | None = None,
        avoid: Callable[[], frozenset[ReplicaId]] = frozenset,
        lease_s: float | None = None,
    ) -> Reservation:
        """Place a request for a carrier. `body`: as the client sent it, or its fields where the carrier has read them.
        `avoid`: returns the replicas that must not get it; asked when it is placed.

        Raises: as `Intake.parse`, `tokenize` and `place`. ReservationHeld: one of this id is held.
        """
        lease_s = self.lease_s if lease_s is None else lease_s
        if not 0 < lease_s <= LONGEST_LEASE_S:
            raise RequestError(f"lease_s={lease_s:g} is not between 0 and {LONGEST_LEASE_S:g}", param="lease_s")
        if self._closing:  # else what has just ended would still take room, and its id
            await asyncio.wait(self._closing)
        reservation_id = self._claim(reservation_id)
        try:
            reservation = await self._placed(endpoint, headers, body, caller, reservation_id, avoid, lease_s)
            if self._is_closed:
                reservation.report(Ended(Outcome.ABORTED), self._loop.time())
                raise NoReplicaError("no reservations are made any more: this process ends")
        except BaseException:
            await self._stacks.pop(reservation_id).aclose()
            raise
        self.add(reservation, self._loop.time())
        self._arm()
        return reservation

    def _claim(self, reservation_id: str | None) -> str:
        reservation_id = secrets.token_hex(12) if reservation_id is None else reservation_id
        if not _SANE_ID.fullmatch(reservation_id):
            raise RequestError("an id has 1 to 128 letters, digits and the signs . _ : -", param="selection_id")
        if reservation_id in self._stacks:
            raise ReservationHeld(f"a reservation {reservation_id!r} is held already; give each request its own id")
        self._stacks[reservation_id] = AsyncExitStack()
        return reservation_id

    async def _placed(
        self,
        endpoint: Endpoint,
        headers: Mapping[bytes, bytes],
        body: bytes | Fields,
        caller: Caller,
        reservation_id: str,
        avoid: Callable[[], frozenset[ReplicaId]],
        lease_s: float,
    ) -> Reservation:
        serving, stack = self._serving, self._stacks[reservation_id]
        request_id = stack.enter_context(serving.ids.taken({b"x-request-id": reservation_id.encode()}))
        if isinstance(body, Fields):
            parsed = serving.take(endpoint, headers, body, request_id, caller)
        else:
            parsed = await serving.parse(endpoint, headers, body, request_id, caller)
        parsed = await stack.enter_async_context(serving.admitted(parsed))
        return Reservation(reservation_id, parsed, await serving.place_together(parsed, avoid), lease_s)

    def report(self, name: str, fact: Report, now: float) -> Reservation:
        reservation = super().report(name, fact, now)
        self._arm()
        return reservation

    def _release(self, reservation: Reservation, end: Ended) -> None:
        stack = self._stacks.pop(reservation.reservation_id)
        closing = self._loop.create_task(stack.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _arm(self) -> None:
        due = self.next_at()
        if due is None or (self._timer is not None and self._timer.when() <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._expire)

    def _expire(self) -> None:
        self._timer = None
        try:
            for reservation in self.expire(self._loop.time()):
                self.num_expired += 1
                structlog.get_logger().warning(
                    "reservation_expired",
                    reservation_id=reservation.reservation_id,
                    replica=reservation.placement.replica_id,
                    lease_s=reservation.lease_s,
                )
        finally:
            self._arm()

    async def close(self) -> None:
        """End every reservation, as cancelled. There are no further ones."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for reservation_id in list(self):
            self.cancel(reservation_id)
        await asyncio.gather(*self._closing)
