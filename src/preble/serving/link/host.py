"""The scheduler process's end of the socket: it places requests for other processes of this host."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog

from preble.core.types import TOKEN_BYTES, PackedTokens, ReplicaId, Request, RequestId
from preble.core.types.life import Ended, Lost, Outcome, Report
from preble.errors import ConfigError, NoReplicaError, PrebleError, RequestError, UnknownRequest
from preble.serving.held import HeldPlacements, HeldRequest
from preble.serving.link import protocol as m
from preble.serving.link.frames import FrameProtocol
from preble.serving.placed import LocalPlaced
from preble.serving.replicas.live import LiveReplicas
from preble.serving.requests import InFlightLimit, RequestIds
from preble.serving.telemetry.numbers import Reading, is_of_table
from preble.serving.terms import Terms
from preble.serving.turns import Turns

_SILENT_S = 15.0
"""A carrier that sends nothing from one such check to the next is cut off. It sends `Heard` every five seconds."""
_LATE_S = 1.0
"""A check that comes so late says nothing of the carrier."""
Answering = Callable[[m.PageRequest], Awaitable[m.PageAnswer]]
_HINT = "the tokenizer's files have changed; start the gateway again"
_COUNT_S = 1.0
"""How long a scrape waits for a carrier's numbers; after that it shows the last ones."""


class SchedulerSocket:
    """Serves carriers on a Unix socket. Only processes of the same user can connect.

    `tokenizer`: what makes this process's token ids. `answer`: answers each `PageRequest`; without it they are refused.
    `keep`: called with the last metrics of a carrier that has gone.
    """

    def __init__(
        self,
        limit: InFlightLimit,
        turns: Turns,
        ids: RequestIds,
        replicas: LiveReplicas,
        tokenizer: str,
        keep: Callable[[list[Reading]], None],
        answer: Answering | None,
    ) -> None:
        """Use `open`."""
        self.limit = limit
        self.turns = turns
        self.ids = ids
        self.tokenizer = tokenizer
        self.keep = keep
        self.answer = answer
        self.carriers: set[_CarrierConnection] = set()
        self._replicas = replicas
        self._server: asyncio.Server | None = None
        replicas.listen(self._tell_replicas)

    @classmethod
    async def open(
        cls,
        path: Path,
        limit: InFlightLimit,
        turns: Turns,
        ids: RequestIds,
        replicas: LiveReplicas,
        tokenizer: str,
        keep: Callable[[list[Reading]], None],
        answer: Answering | None = None,
    ) -> SchedulerSocket:
        """Listen at a path. Raises: ConfigError: it cannot be used, or another process listens there."""
        path = _expanded(path)
        if await _is_served(path):
            raise ConfigError(f"the scheduler's socket {path} is in use; give each gateway a path of its own")
        bound = _bound(path)
        host = cls(limit, turns, ids, replicas, tokenizer, keep, answer)
        host._server = await asyncio.get_running_loop().create_unix_server(lambda: _CarrierConnection(host), sock=bound)
        return host

    def close(self) -> None:
        """Stop listening, and end every connection."""
        if self._server is not None:
            self._server.close()
        for carrier in list(self.carriers):
            carrier.close()

    def rows(self, tokenizer: str) -> m.Replicas:
        """Return all live replicas, for a carrier whose token ids this tokenizer makes."""
        held_back = self._replicas.held_back
        return m.Replicas(
            [
                m.LinkedReplica(
                    replica_id,
                    replica.engine.url,
                    replica.engine.adapter,
                    replica.info,
                    replica.engine.rank,
                    replica.engine.model_path,
                    replica_id in held_back,
                    replica.takes_ids and tokenizer == self.tokenizer,
                    replica.engine.kv_peer,
                    replica.engine.num_ranks,
                )
                for replica_id, replica in self._replicas.items()
            ]
        )

    def base_model(self, model: str | None) -> str:
        """Return the base model of the replicas that serve `model`. Raises: UnknownModel."""
        return self._replicas.of_model(model).base_model

    def suspect(self, replica_id: str) -> None:
        """Have a replica checked."""
        self._replicas.suspect(ReplicaId(replica_id))

    def _tell_replicas(self) -> None:
        for carrier in self.carriers:
            carrier.send(self.rows(carrier.tokenizer))

    async def readings(self) -> list[list[Reading]]:
        """Return the metrics of every carrier that is connected, as they are now or were a moment ago."""
        counts = [carrier.count() for carrier in self.carriers]
        if counts:
            await asyncio.wait(counts, timeout=_COUNT_S)
        return [carrier.readings for carrier in self.carriers]


def _expanded(path: Path) -> Path:
    return path.expanduser()


def _bound(path: Path) -> socket.socket:
    """Return a socket that only this user can connect to. Raises: ConfigError."""
    bound = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o177)
    try:
        if path.exists() and not path.is_socket():
            raise FileExistsError(errno.EEXIST, "something else lies there, and stays")
        path.unlink(missing_ok=True)
        bound.bind(str(path))
    except OSError as error:
        bound.close()
        text = f"the scheduler's socket {path} cannot be made: {error.strerror or error}"
        raise ConfigError(f"{text}; set scheduler_socket, or TMPDIR, to a short path that can be written") from error
    finally:
        os.umask(umask)
    return bound


async def _is_served(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except (BlockingIOError, PermissionError):  # somebody is too busy, or does not want this user
        return True
    except OSError:
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True


class _Held(HeldRequest):
    """A placement for a carrier on a connection. `admitted`: the number of its request's `Admit`."""

    def __init__(self, placed: LocalPlaced, admitted: int, on_lost: Callable[[Lost], None]) -> None:
        self.placed_here = placed
        self.admitted = admitted
        self._on_lost = on_lost
        super().__init__((placed,))

    def lost(self, loss: Lost) -> None:
        super().lost(loss)
        self._on_lost(loss)


class _CarrierConnection(FrameProtocol[m.ToScheduler]):
    """One connection of a carrier. When it ends, all placements of the carrier end."""

    def __init__(self, host: SchedulerSocket) -> None:
        super().__init__(m.ToScheduler)
        self.readings: list[Reading] = []
        self.tokenizer = ""
        self._host = host
        self._admitted: dict[int, Terms] = {}
        self._placed: HeldPlacements[int, _Held] = HeldPlacements()
        self._failed: dict[int, dict[int, LocalPlaced]] = {}
        """Placements that have ended and may be placed again, by the number of their request."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._counts: dict[int, asyncio.Future[None]] = {}
        self._is_silent = self._is_welcome = False
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            m.Admit: self._admit,
            m.Leave: lambda message: self._leave(message.number),
            m.Place: self._place,
            m.PlaceAgain: self._place_again,
            m.Withdraw: self._withdraw,
            m.PlacementReport: self._take_report,
            m.Suspect: lambda message: self._host.suspect(message.replica_id),
            m.Heard: self._hear,
            m.PageRequest: self._ask,
            m.MetricsReport: self._note_numbers,
        }

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._timer = self._loop.call_later(_SILENT_S, self._check_silence)

    def _check_silence(self) -> None:
        """Close a silent connection. A loop that was itself held up has not read yet what the carrier sent."""
        is_late = self._loop.time() > self._timer.when() + _LATE_S
        if self._is_silent and not is_late:
            structlog.get_logger().warning("carrier_silent", seconds=_SILENT_S, consequence="its placements end")
            self.close()
        self._is_silent = True
        self._timer = self._loop.call_later(_SILENT_S, self._check_silence)

    def received(self, message: m.ToScheduler) -> None:
        self._is_silent = False
        if self._is_welcome and not isinstance(message, m.Hello):
            try:
                self._handlers[type(message)](message)
            except Exception as error:
                if isinstance(error, msgspec.DecodeError) or not isinstance(message, (m.Admit, m.Place, m.PlaceAgain)):
                    raise
                self._refuse(message.number, error)
            return
        if self._is_welcome or not isinstance(message, m.Hello) or message.version != m.VERSION:
            raise msgspec.DecodeError(f"a carrier must send Hello with version {m.VERSION} first, and once")
        self.tokenizer = message.tokenizer
        structlog.get_logger().info("carrier_connected", name=message.name)
        if self.tokenizer and self.tokenizer != self._host.tokenizer:
            consequence = "it sends texts, never token ids; cached prompts are not found"
            structlog.get_logger().error("tokenizer_differs", name=message.name, consequence=consequence, hint=_HINT)
        self._is_welcome = True
        self._host.carriers.add(self)
        self.send(m.Welcome(m.VERSION))
        self.send(self._host.rows(self.tokenizer))

    # requests

    def _admit(self, message: m.Admit) -> None:
        terms = self._enter(message.number, message.terms, again=message.again)
        self.send(m.Admitted(message.number, terms.request_id))

    def _enter(self, number: int, terms: Terms, *, again: bool = False) -> Terms:
        """Admit a request; return its terms, with the id that it got. Raises: RequestError, Overloaded."""
        if number in self._admitted:
            raise _used(number)
        self._host.limit.enter(terms, again=again)
        request_id = self._host.ids.claim(terms.request_id)
        if request_id != terms.request_id:
            terms = msgspec.structs.replace(terms, request_id=request_id)
        self._admitted[number] = terms
        return terms

    def _leave(self, number: int) -> None:
        terms = self._admitted.pop(number, None)
        self._failed.pop(number, None)
        if terms is not None:  # else it was refused, and the carrier did not know that yet
            self._host.limit.leave(terms)
            self._host.ids.release(terms.request_id)

    def _place(self, message: m.Place) -> None:
        self._require_new(message.number)
        number = message.admitted
        terms = self._admitted.get(number) if message.terms is None else self._enter(number, message.terms)
        if terms is None:
            raise UnknownRequest(f"request {number} is not admitted")
        request = _request(message, self._host.base_model(terms.model))
        if self._host.turns.takes_turns(terms):
            self._in_background(message.number, self._place_in_turn, message, request, terms)
        else:
            self._keep_copied(message.number, message.admitted, self._host.turns.place_at_once(request, terms))

    async def _place_in_turn(self, message: m.Place, request: Request, terms: Terms) -> None:
        self._keep(message.number, message.admitted, await self._host.turns.place(request, terms))

    def _place_again(self, message: m.PlaceAgain) -> None:
        self._require_new(message.number)
        admitted = next((number for number, failed in self._failed.items() if message.ended in failed), None)
        if admitted is None:
            raise UnknownRequest(f"placement {message.ended} has not failed")
        self._keep_copied(message.number, admitted, self._failed[admitted].pop(message.ended).placed_again())

    def _keep_copied(self, number: int, admitted: int, placed: LocalPlaced) -> None:
        """Do as `_keep`, after the placement's copy if it has one."""
        if placed.placement.transfer is None:
            self._keep(number, admitted, placed)
            return
        self._in_background(number, self._keep_when_copied, number, admitted, placed)
        # Cancelled before its first step, the task would never see the placement.
        self._tasks[number].add_done_callback(lambda task: placed.cancelled() if task.cancelled() else None)

    async def _keep_when_copied(self, number: int, admitted: int, placed: LocalPlaced) -> None:
        self._keep(number, admitted, await self._host.turns.copies.carry_out(placed))

    def _keep(self, number: int, admitted: int, placed: LocalPlaced) -> None:
        at = placed.placement
        tokens = (at.matched_tokens, at.num_prompt_tokens)
        terms = self._admitted.get(admitted)
        weighed = tuple(at.candidates) if terms is not None and terms.is_traced else ()
        where = (at.request_id, at.replica_id, at.reason)
        predicted = (at.predicted_ttft_s, at.predicted_ttft_p98_s, at.predicted_tpot_s, at.predicted_tpot_p98_s)
        self.send(m.PlacedOn(number, *where, *tokens, placed.placed_at, weighed, *predicted, at.transfer))
        # After it: the replica may have left since the request's turn, and the carrier is told so at once.
        self._placed.hold(number, _Held(placed, admitted, lambda loss: self.send(m.PlacementReport(number, loss))))

    def _withdraw(self, message: m.Withdraw) -> None:
        if message.number in self._placed:  # perhaps by a task that has ended in this turn of the event loop
            self._report(message.number, Ended(Outcome.ABORTED))
        elif (task := self._tasks.get(message.number)) is not None:
            task.cancel()

    def _take_report(self, message: m.PlacementReport) -> None:
        if message.number in self._placed and not isinstance(message.fact, Lost):  # else it was withdrawn
            with suppress(NoReplicaError):  # it moved to a replica that has just left, so it will fail or move again
                self._report(message.number, message.fact)
        if message.leaves is not None:
            self._leave(message.leaves)

    def _report(self, number: int, fact: Report) -> None:
        held = self._placed.report(number, fact, self._loop.time())
        if isinstance(fact, Ended) and fact.outcome.may_move and held.admitted in self._admitted:
            self._failed.setdefault(held.admitted, {})[number] = held.placed_here

    def _hear(self, message: m.Heard) -> None:
        for number, at in message.at.items():
            if (held := self._placed.get(number)) is not None:
                held.heard_at = at
        self.send(m.HeardReply())

    # everything else

    def _ask(self, message: m.PageRequest) -> None:
        self._require_new(message.number)
        self._in_background(message.number, self._answer, message)

    async def _answer(self, message: m.PageRequest) -> None:
        if self._host.answer is None:
            raise RequestError("this scheduler process answers no HTTP requests; send them to the gateway's port")
        self.send(await self._host.answer(message))

    def count(self) -> asyncio.Future[None]:
        """Ask for the carrier's metrics. The future is done when `readings` has them, or the connection is over."""
        number = max(self._counts, default=0) + 1
        self._counts[number] = future = self._loop.create_future()
        self.send(m.Count(number))
        return future

    def _note_numbers(self, message: m.MetricsReport) -> None:
        for reading in message.readings:  # else every scrape would fail, and so would what the connection's end ends
            if not is_of_table(reading):
                raise msgspec.DecodeError(f"{reading[0][:50]!r} with these labels and numbers is no metric")
        self.readings = message.readings
        if (future := self._counts.pop(message.number, None)) is not None and not future.done():
            future.set_result(None)

    def _in_background(self, number: int, work: Callable[..., Awaitable[None]], *given: Any) -> None:
        task = self._tasks[number] = self._loop.create_task(self._done_or_refused(number, work, *given))
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _done_or_refused(self, number: int, work: Callable[..., Awaitable[None]], *given: Any) -> None:
        try:
            await work(*given)
        except Exception as error:  # noqa: BLE001 (see `_refuse`)
            self._refuse(number, error)

    def _refuse(self, number: int, error: Exception) -> None:
        """Answer a message with an error: one request's trouble must not end the other requests of its carrier."""
        if not isinstance(error, PrebleError):
            structlog.get_logger().error("placing_failed", exc_info=error)
            error = PrebleError("placing failed; the log has the details")
        self.send(m.refused(number, error))

    def _require_new(self, number: int) -> None:
        if number in self._placed or number in self._tasks:
            raise _used(number)

    def ended(self) -> None:
        self._timer.cancel()
        self._host.carriers.discard(self)
        for task in list(self._tasks.values()):
            task.cancel()
        for future in self._counts.values():
            if not future.done():
                future.set_result(None)
        self._host.keep(self.readings)
        try:
            self._placed.end_all(self._loop.time())
        finally:
            for number in list(self._admitted):
                self._leave(number)


def _used(number: int) -> msgspec.DecodeError:
    """Return the error of a number that is in use: answers to it would mean two things."""
    return msgspec.DecodeError(f"the number {number} is in use; use each number once on a connection")


def _request(message: m.Place, base_model: str) -> Request:
    """Raises: RequestError: the last token id is incomplete."""
    if len(message.tokens) % TOKEN_BYTES:
        raise RequestError(f"`tokens` has {len(message.tokens)} bytes; give {TOKEN_BYTES} for each id")
    return Request(
        RequestId(message.request_id),
        PackedTokens(message.tokens),
        message.max_output_tokens,
        message.namespace,
        frozenset(map(ReplicaId, message.avoid)),
        base_model,
        keeps_kv=message.keeps_kv,
        splits=message.splits,
    )
