"""A carrier's end of the scheduler's socket: it connects, reconnects, and keeps track of what is under way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import structlog

from preble import background
from preble.background import Backoff
from preble.core.types import Placement, ReplicaId, Request
from preble.core.types.life import Ended, Lost, Moved, Report
from preble.engines import Engine
from preble.errors import NoReplicaError, UnknownRequest
from preble.serving.link import protocol as m
from preble.serving.link.frames import FrameProtocol
from preble.serving.placed import Placed, engine_for
from preble.serving.telemetry.numbers import Reading
from preble.serving.terms import Terms

_PULSE_S = 1.0
_FULL_PULSE = 5
"""Every fifth pulse is sent even if no request is under way. It brings the metrics, too."""
_SILENT_S = 10.0
"""A scheduler process that says nothing for this long counts as away."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0


class SchedulerAway(NoReplicaError):
    """The scheduler process cannot be reached now."""


class Ticket:
    """The admission of one request. `refusal`: the error if it was refused. `terms`: with the id that it got.
    `is_told`: whether the scheduler process has been asked."""

    __slots__ = ("_is_answered", "_waiting", "is_told", "number", "refusal", "terms")

    def __init__(self, number: int, terms: Terms) -> None:
        self.number = number
        self.terms = terms
        self.is_told = False
        self.refusal: BaseException | None = None
        self._is_answered = False
        self._waiting: asyncio.Future[None] | None = None

    def answered(self) -> None:
        """The answer has come, or none will."""
        self._is_answered = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def granted(self) -> str:
        """Wait for the answer; return the request's id. Call it once. Raises: the refusal."""
        if not self._is_answered:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self.refusal is not None:
            raise self.refusal
        return self.terms.request_id


class SchedulerLink:
    """The connection to the scheduler process. It reconnects whenever the connection ends.

    `tokenizer`: what makes this process's token ids. `on_replicas`: called with all live replicas, at every change.
    `engine_of`: returns the client of one. `readings`: this process's metrics.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        tokenizer: str,
        on_replicas: Callable[[m.Replicas], None],
        engine_of: Callable[[ReplicaId], Engine],
        readings: Callable[[], list[Reading]],
    ) -> None:
        self.is_up = False
        self._path = path
        self.hello = m.Hello(m.VERSION, name, tokenizer)
        self._on_replicas = on_replicas
        self.engine_of = engine_of
        self._readings = readings
        self._numbers = count(1)
        self._connection: _LinkConnection | None = None
        self._tickets: dict[int, Ticket] = {}
        self._asked: dict[int, tuple[asyncio.Future[Any], Callable[[Any], Any]]] = {}
        self._placed: dict[int, LinkedPlaced] = {}
        self._log = structlog.get_logger()
        self._loop = asyncio.get_running_loop()
        self._task = background.keep(self._run, "scheduler link")

    async def close(self) -> None:
        """Send what waits to be sent, and end the connection for good."""
        self.is_up = False
        if self._connection is not None:
            self._connection.finish()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # what a carrier asks

    def admit(self, terms: Terms, *, at_once: bool) -> Ticket:
        """Ask for the admission of a request: at once, or together with its first placement. If the scheduler process
        is away, we ask when it is back."""
        ticket = Ticket(next(self._numbers), terms)
        if at_once:
            self._tell_of(ticket)
        self._tickets[ticket.number] = ticket
        return ticket

    def _tell_of(self, ticket: Ticket, *, again: bool = False) -> None:
        ticket.is_told = True
        self._send(m.Admit(ticket.number, ticket.terms, again))

    def leave(self, ticket: Ticket) -> None:
        """The request is over."""
        del self._tickets[ticket.number]
        if ticket.is_told and self.is_up and self._connection is not None:
            self._connection.leave(ticket.number)

    async def place(self, request: Request, ticket: Ticket, again: Again, on_end: OnEnd | None) -> LinkedPlaced:
        """`on_end`: called at the end, with the tokens generated.

        Raises: SchedulerAway. PrebleError: it cannot be placed, or was not admitted.
        """
        number = next(self._numbers)
        message = m.Place(
            number,
            ticket.number,
            request.request_id,
            request.prompt,
            request.max_output_tokens,
            request.namespace,
            list(request.avoid),
            request.keeps_kv,
            None if ticket.is_told else ticket.terms,
            request.splits,
        )
        ticket.is_told = True
        try:
            return await self._place(number, ticket.number, message, again, on_end)
        except UnknownRequest:
            raise ticket.refusal or SchedulerAway("the request is not admitted") from None

    async def place_again(self, ended: LinkedPlaced, again: Again) -> LinkedPlaced:
        """Raises: SchedulerAway. UnknownRequest: it was placed before the scheduler process restarted. PrebleError."""
        number = next(self._numbers)
        message = m.PlaceAgain(number, ended.number)
        return await self._place(number, ended.admitted, message, again, ended.on_end)

    async def _place(
        self, number: int, admitted: int, message: m.Message, again: Again, on_end: OnEnd | None
    ) -> LinkedPlaced:
        def read(answer: m.PlacedOn) -> LinkedPlaced:
            placement = m.placement_of(answer)
            engine = engine_for(placement, self.engine_of)
            placed = LinkedPlaced(self, number, admitted, placement, engine, answer.placed_at, again, on_end)
            self._placed[number] = placed
            return placed

        future: asyncio.Future[LinkedPlaced] = self._ask(number, message, read)
        try:
            return await future
        except asyncio.CancelledError:
            if self._asked.pop(number, None) is not None:
                self._send(m.Withdraw(number))
            elif not future.cancelled() and future.exception() is None:
                future.result().cancelled()
            raise

    async def page(self, method: str, path: str, query: bytes, headers: Any, body: bytes) -> m.PageAnswer:
        """Have the scheduler process answer an HTTP request. Raises: SchedulerAway."""
        number = next(self._numbers)
        answer: m.PageAnswer = await self._ask(
            number, m.PageRequest(number, method, path, query, headers, body), lambda it: it
        )
        return answer

    def report(self, placed: LinkedPlaced, fact: Report) -> None:
        """Report what has happened to a placement, unless the scheduler process that made it has ended."""
        if placed.number not in self._placed or self._connection is None:
            return
        if isinstance(fact, Ended):
            del self._placed[placed.number]
            self._connection.end(m.PlacementReport(placed.number, fact), placed.admitted)
        else:
            self._send(m.PlacementReport(placed.number, fact))

    def tell(self, message: m.Message) -> None:
        """Send a message that is about no placement. Drops it while the scheduler process is away."""
        self._send(message)

    def _ask(self, number: int, message: m.Message, read: Callable[[Any], Any]) -> asyncio.Future[Any]:
        if not self.is_up:
            raise SchedulerAway("the scheduler process is away; it is being started again")
        self._send(message)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._asked[number] = (future, read)
        return future

    def _send(self, message: m.Message) -> None:
        if self.is_up and self._connection is not None:
            self._connection.send(message)

    # what the scheduler process says

    def received(self, message: m.FromScheduler) -> None:
        match message:
            case m.PlacedOn() | m.PageAnswer():
                self._answered(message)
            case m.Admitted():
                self._admitted(message)
            case m.Refused():
                self._refused(message)
            case m.PlacementReport():
                if (placed := self._placed.get(message.number)) is not None and isinstance(message.fact, Lost):
                    placed.lose(message.fact)
            case m.Replicas():
                self._on_replicas(message)
                if not self.is_up:
                    self._began()
            case m.Count():
                self._send(m.MetricsReport(message.number, self._readings()))
            case m.Welcome() | m.HeardReply():
                pass

    def _answered(self, message: m.PlacedOn | m.PageAnswer) -> None:
        future, read = self._asked.pop(message.number, (None, None))
        if future is None or read is None:
            return  # nobody waits any more, and `Withdraw` was sent
        if future.done():  # the client left in this turn of the event loop
            self._send(m.Withdraw(message.number))
            return
        try:
            future.set_result(read(message))
        except Exception as error:  # noqa: BLE001 (whoever waits hears it): this process cannot use the replica
            self._send(m.Withdraw(message.number))
            future.set_exception(error)

    def _admitted(self, message: m.Admitted) -> None:
        if (ticket := self._tickets.get(message.number)) is not None:
            if message.request_id != ticket.terms.request_id:
                ticket.terms = msgspec.structs.replace(ticket.terms, request_id=message.request_id)
            ticket.answered()

    def _refused(self, message: m.Refused) -> None:
        error = m.error_of(message.kind, message.text, message.details)
        if (ticket := self._tickets.get(message.number)) is not None:
            ticket.refusal = error
            ticket.answered()
        elif message.number in self._asked:
            future, _ = self._asked.pop(message.number)
            if not future.done():
                future.set_exception(error)

    # the connection

    async def _run(self) -> None:
        backoff = Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S)
        while True:
            with contextlib.suppress(OSError):  # the scheduler process does not listen yet
                await self._connect()
                backoff.reset()
            await backoff.pause()

    async def _connect(self) -> None:
        """Connect, and stay until the connection is over. Raises: OSError."""
        connection = _LinkConnection(self)
        try:
            await self._loop.create_unix_connection(lambda: connection, str(self._path))
        except asyncio.CancelledError:
            connection.dropped()
            raise
        self._connection = connection
        try:
            await connection.is_over.wait()
        finally:
            connection.finish()

    def pulse(self, number: int) -> None:
        """Send a sign of life, if one is due. `number`: of the pulse on this connection, from 1."""
        is_full = number % _FULL_PULSE == 0
        if self._tickets or is_full:
            self._send(m.Heard(self._last_heard()))
        if is_full:
            self._send(m.MetricsReport(0, self._readings()))

    def _last_heard(self) -> dict[int, float]:
        heard = {}
        for number, placed in self._placed.items():
            at = placed.heard_at()
            if at is not None and at != placed.told_at:
                heard[number] = placed.told_at = at
        return heard

    def _began(self) -> None:
        """The scheduler process is back: have it count the requests that are under way."""
        self.is_up = True
        self._log.info("scheduler_connected", path=str(self._path))
        for ticket in self._tickets.values():
            self._tell_of(ticket, again=True)

    def ended(self, connection: _LinkConnection) -> None:
        """A connection is over: everything that waits for an answer on it fails."""
        if connection is not self._connection:
            return
        if self.is_up:
            self._log.warning("scheduler_away", consequence="requests are placed by load until it is back")
        self.is_up = False
        self._connection = None
        self._placed.clear()
        asked, self._asked = self._asked, {}
        for future, _ in asked.values():
            if not future.done():
                future.set_exception(SchedulerAway("the scheduler process has ended; it is being started again"))
        for ticket in self._tickets.values():
            ticket.answered()  # the request goes on; the scheduler process counts it when it is back


class _LinkConnection(FrameProtocol[m.FromScheduler]):
    def __init__(self, link: SchedulerLink) -> None:
        super().__init__(m.FromScheduler)
        self._link = link
        self.heard_at = self._loop.time()
        self.is_over = asyncio.Event()
        self._num_pulses = 0
        self._end: tuple[m.PlacementReport, int] | None = None
        """An end that is not sent yet, with the number of its request's admission."""

    def end(self, message: m.PlacementReport, admitted: int) -> None:
        """Send the end of a placement. If nothing but the request's `leave` follows, both are one message."""
        self._put_end()
        self._end = (message, admitted)
        self._flush_soon()

    def leave(self, admitted: int) -> None:
        """Send that a request is over."""
        if self._end is not None and self._end[1] == admitted:
            self._end[0].leaves = admitted
        else:
            self.send(m.Leave(admitted))

    def _put(self, message: m.Message) -> None:
        self._put_end()
        super()._put(message)

    def _put_end(self) -> None:
        if self._end is not None:
            (message, _), self._end = self._end, None
            super()._put(message)

    def _flush(self) -> None:
        self._put_end()
        super()._flush()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(self._link.hello)
        self._beat = self._loop.call_later(_PULSE_S, self._pulse)

    def _pulse(self) -> None:
        if self._loop.time() - self.heard_at > _SILENT_S:
            structlog.get_logger().warning("scheduler_silent", seconds=_SILENT_S)
            self.close()
            return
        self._beat = self._loop.call_later(_PULSE_S, self._pulse)
        self._num_pulses += 1
        try:
            self._link.pulse(self._num_pulses)
        except Exception:  # noqa: BLE001 (whatever is wrong with this connection, the next one may do without it)
            structlog.get_logger().exception("scheduler_link_failed")
            self.close()

    def received(self, message: m.FromScheduler) -> None:
        self.heard_at = self._loop.time()
        self._link.received(message)

    def ended(self) -> None:
        self._beat.cancel()
        self.is_over.set()
        self._link.ended(self)


class LinkedPlaced(Placed):
    """A placement that the scheduler process made. Reports go there; one message has all that the end reports."""

    __slots__ = ("_again", "_link", "admitted", "number", "on_end", "told_at")

    def __init__(
        self,
        link: SchedulerLink,
        number: int,
        admitted: int,
        placement: Placement,
        engine: Engine,
        placed_at: float,
        again: Again,
        on_end: OnEnd | None,
    ) -> None:
        super().__init__(placement, engine, placed_at)
        self._link = link
        self._again = again
        self.number = number
        self.admitted = admitted
        self.on_end = on_end
        self.told_at: float | None = None
        """The last `heard_at` that the scheduler process knows."""

    async def place_again(self) -> Placed:
        return await self._again(self)

    def _take(self, fact: Report) -> None:
        if isinstance(fact, Moved):
            self.engine = self._link.engine_of(fact.replica_id)
            self.placement = dataclasses.replace(self.placement, replica_id=fact.replica_id)
        self._link.report(self, fact)
        if isinstance(fact, Ended) and self.on_end is not None:
            self.on_end(fact.output_tokens or 0)


Again = Callable[[LinkedPlaced], Awaitable[Placed]]
OnEnd = Callable[[int], None]
