"""One scheduler for each deployment in each process that has routers to it.

It is in a module of its own, since Ray copies the router's module into each router. It stands on the serving room, as
every carrier does; here Ray carries the requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from preble.config import GatewayConfig
from preble.core.types import ReplicaId
from preble.core.types.life import Alive, Ended, FirstToken, Moved, Progress, Report
from preble.integrations.ray.hub import HubBus, logger
from preble.integrations.ray.prompts import EndpointRequest, asked_of
from preble.integrations.ray.replica import Advert, advert_of, member_of, running, url_of
from preble.integrations.ray.reports import decode_reports
from preble.reservations import LONGEST_LEASE_S, Reservation, ReservationHeld, Reservations, UnknownReservation
from preble.serving import Serving

MOST_S = 5.0
"""A request that is not placed by then goes where Ray sends it."""
_USAGE_S = 0.25
"""How long a request that has ended waits for its replica's report of its usage, which comes on another way."""
_FIRST_LEASE_S = 30.0
"""Of a request that Ray does not see end, until its replica reports that it is there."""
_LEASE_S = 300.0
"""From then on."""
RESERVATION = "preble_reservation_id"
"""The argument of `choose_replica` with the id under which a replica will report the request's end."""
_SOURCE = "ray"


class PlacerState(msgspec.Struct, frozen=True, kw_only=True):
    """What one process knows of a deployment. `is_connected`: whether it reaches its peers, and replicas' reports it.

    `in_flight`: requests that it has placed; `assumed`: those that its `peers`, other processes, have. `replicas`:
    the live ones, and whether each reports KV events. `unplaced`: requests so far that Ray had to place itself.
    """

    is_connected: bool = False
    in_flight: int = 0
    assumed: int = 0
    peers: int = 0
    replicas: Mapping[str, bool] = MappingProxyType({})
    unplaced: int = 0


class _Request:
    """A request at Ray's router. `reserving`: gives its reservation."""

    def __init__(self, reserving: asyncio.Task[Reservation]) -> None:
        self.reserving = reserving
        self.has_token = False
        self.has_usage = False
        self.num_stale = 0
        """Attempts whose end Ray will report although the request goes on: a replica refused it."""
        self._attempt: asyncio.Future[Any] | None = None

    @property
    def reservation(self) -> Reservation | None:
        """None while there is none, and if there never will be."""
        task = self.reserving
        is_there = task.done() and not task.cancelled() and task.exception() is None
        return task.result() if is_there else None

    def is_new_attempt(self, attempt: asyncio.Future[Any]) -> bool:
        """Note that Ray asks for this attempt, and return whether it is the first time."""
        if attempt is self._attempt:
            return False
        self.num_stale += self._attempt is not None
        self._attempt = attempt
        return True


class Placer:
    """Places the requests of one deployment. Use within the running event loop in which it is made.

    `num_unplaced`: requests so far that Ray had to place itself.
    """

    def __init__(self, deployment: str, config: GatewayConfig) -> None:
        self.config = config
        self.num_unplaced = 0
        self.closing: asyncio.Task[None] | None = None
        self._deployment = deployment
        self._requests: dict[str, _Request] = {}
        self._replicas: dict[str, Advert] = {}
        self._serving: Serving | None = None
        self._reservations: Reservations | None = None
        self._starting: asyncio.Task[None] | None = None
        self._further: WeakKeyDictionary[Reservation, int] = WeakKeyDictionary()
        """How many more direct requests run that have the id of one with a reservation."""

    def start(self) -> None:
        """Watch the replicas and join the peers, if that has not begun or has failed.

        A process that sends nothing need not.
        """
        if self._starting is None or (self._starting.done() and self._serving is None):
            self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        self._serving = await Serving.start(self.config, bus=partial(HubBus, self._deployment, self._take_reports))
        self._reservations = Reservations(self._serving)
        self._follow()

    async def close(self) -> None:
        """Forget all requests and leave the replicas."""
        for request_id in list(self._requests):
            self.cancelled(request_id)
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._reservations is not None and self._serving is not None:
            await self._reservations.close()
            await self._serving.close()

    # replicas

    def update_replicas(self, replicas: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """These run now: their ids and routing stats."""
        adverts = {url_of(replica): advert_of(stats) for replica, stats in replicas}
        for url in self._replicas.keys() - adverts.keys():
            running().pop(url, None)
        running().update(adverts)
        self._replicas = adverts
        self._follow()

    def _follow(self) -> None:
        if self._serving is not None:
            members = self._serving.members
            members.wanted.set(_SOURCE, [member_of(url, advert) for url, advert in self._replicas.items()])
            members.reconcile()

    # requests

    async def choose(self, pending: Any) -> str | None:
        """Return the id of the replica for Ray's pending request; None if Ray has to choose. Raises nothing.

        Ray asks again while it finds no room at the chosen replica, or when that has refused the request.
        """
        request_id = pending.metadata.internal_request_id
        direct_id = pending.kwargs.get(RESERVATION)
        try:
            asked = asked_of((*pending.args, *pending.kwargs.values()), pending.metadata.multiplexed_model_id)
            if asked is None:
                return None
            async with asyncio.timeout(MOST_S):
                if direct_id is not None:
                    return _id_of(await self._reserve_direct(direct_id, asked))
                return await self._place(request_id, asked, pending.future)
        except Exception as error:  # noqa: BLE001 (Ray would only log it, and the request would wait for ever)
            self.cancelled(request_id)
            self.num_unplaced += 1
            if self.num_unplaced & (self.num_unplaced - 1) == 0:  # the 1st, 2nd, 4th, 8th and so on
                reason = str(error) or type(error).__name__
                logger.warning("Preble could not place a request (%d so far): %s", self.num_unplaced, reason)
            return None

    async def _place(self, request_id: str, asked: EndpointRequest, attempt: asyncio.Future[Any]) -> str:
        request = self._requests.get(request_id)
        if request is None:
            reserving = asyncio.create_task(self._reserve(request_id, asked, LONGEST_LEASE_S))
            request = self._requests[request_id] = _Request(reserving)
        if request.is_new_attempt(attempt):
            attempt.add_done_callback(partial(self._attempted, request_id, request))
        return _id_of(await asyncio.shield(request.reserving))

    async def _reserve(self, request_id: str, asked: EndpointRequest, lease_s: float) -> Reservation:
        self.start()
        assert self._starting is not None
        await asyncio.shield(self._starting)
        assert self._reservations is not None
        reservation = await self._reservations.reserve(
            asked.endpoint, {}, asked.body, reservation_id=request_id, lease_s=lease_s
        )
        reservation.forget_prompt()
        return reservation

    async def _reserve_direct(self, request_id: str, asked: EndpointRequest) -> Reservation:
        """Raises: ReservationHeld: a client gives its requests one id; Ray places this one, and its end is no end."""
        held = self._held(request_id)
        if held is not None and held[request_id].loss is not None:
            held.cancel(request_id)  # nobody will report its end, and its client asks again
        try:
            return await self._reserve(request_id, asked, _FIRST_LEASE_S)
        except ReservationHeld:
            if (held := self._held(request_id)) is not None:
                self._further[held[request_id]] = self._further.get(held[request_id], 0) + 1
            raise

    def sent_to(self, request_id: str, replica: str) -> None:
        """Ray sends a direct request to this replica: to another one than was chosen, if that is gone."""
        to, held = ReplicaId(url_of(replica)), self._held(request_id)
        if held is None or self._serving is None or to not in self._serving.replicas:
            return
        if held[request_id] not in self._further:  # else it may be the other request of that id
            held[request_id].report(Moved(to), asyncio.get_running_loop().time())

    def _attempted(self, request_id: str, request: _Request, attempt: asyncio.Future[Any]) -> None:
        """Ray sends the request to a replica, perhaps not to the chosen one, or nobody wants it any more."""
        if attempt.cancelled():
            self.cancelled(request_id)
            return
        to = ReplicaId(url_of(attempt.result().replica_id.unique_id))
        reservation = request.reservation
        if reservation is not None and self._serving is not None and to in self._serving.replicas:
            reservation.report(Moved(to), asyncio.get_running_loop().time())

    def ended(self, request_id: str) -> None:
        """Ray says that an attempt at a request is over, well or not."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.num_stale:
            request.num_stale -= 1
        elif request.has_token and not request.has_usage:
            asyncio.get_running_loop().call_later(_USAGE_S, self._end, request_id, request)
        else:
            self._end(request_id, request)

    def _held(self, request_id: str) -> Reservations | None:
        """Return where a request's reservation is held; None before it is placed, and after an hour, when its lease
        ends.
        """
        return self._reservations if request_id in (self._reservations or ()) else None

    def _end(self, request_id: str, request: _Request) -> None:
        if self._requests.get(request_id) is request:
            del self._requests[request_id]
            if (held := self._held(request_id)) is not None:
                # Ray says nothing of tokens; an end without any would mean that the prompt was not computed.
                end = Ended() if request.has_usage else Ended(output_tokens=1)
                held.report(request_id, end, asyncio.get_running_loop().time())
            else:
                request.reserving.cancel()

    def cancelled(self, request_id: str) -> None:
        """Nothing will be sent for this request any more."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if (held := self._held(request_id)) is not None:
            held.cancel(request_id)
        else:
            request.reserving.cancel()

    def _take_reports(self, packet: bytes) -> None:
        now = asyncio.get_running_loop().time()
        for request_id, fact in decode_reports(packet):
            with suppress(UnknownReservation):  # another process has placed it, or it is over
                self._take(request_id, fact, now)

    def _take(self, request_id: str, fact: Report, now: float) -> None:
        reservations, request = self._reservations, self._requests.get(request_id)
        if reservations is None:
            return
        if isinstance(fact, Ended) and request is None and self._has_further(reservations[request_id]):
            self._further[reservations[request_id]] -= 1
            return
        if isinstance(fact, Alive) and request is None:
            fact = Alive(_LEASE_S)
        elif request is not None:
            if isinstance(fact, Ended):
                return  # Ray says when it ends
            request.has_token |= isinstance(fact, FirstToken)
            request.has_usage |= isinstance(fact, Progress)
        reservations.report(request_id, fact, now)

    def _has_further(self, reservation: Reservation) -> bool:
        """Return whether an end may be another request's of its id: not if the replica that would report its own has
        died.
        """
        return reservation.loss is None and self._further.get(reservation, 0) > 0

    def state(self) -> PlacerState:
        """Return what it knows now."""
        serving = self._serving
        if serving is None or serving.group is None:
            return PlacerState(unplaced=self.num_unplaced)
        return PlacerState(
            is_connected=serving.group.is_connected,
            in_flight=serving.num_in_flight,
            assumed=serving.scheduler.snapshot().num_assumed,
            peers=len(serving.group.peers),
            replicas={
                url.removeprefix(url_of("")): live.info.spec.reports_events for url, live in serving.replicas.items()
            },
            unplaced=self.num_unplaced,
        )


def _id_of(reservation: Reservation) -> str:
    """Return the replica's id at Ray."""
    return reservation.placement.replica_id.removeprefix(url_of(""))


@cache
def _placers() -> dict[tuple[str, asyncio.AbstractEventLoop], Placer]:
    """Return the placers of this process."""
    return {}


def placer_states() -> dict[str, PlacerState]:
    """Return what this process knows of each deployment to which it has routers, by the deployment's id."""
    return {deployment: placer.state() for (deployment, _), placer in _placers().items()}


def sent_to(request_id: str, replica: str) -> None:
    """Note the replica to which Ray sends a direct request. `replica`: its id at Ray."""
    for placer in _placers().values():
        placer.sent_to(request_id, replica)


def placer_of(deployment: str, config: GatewayConfig) -> Placer:
    """Return the placer that all routers to a deployment share in this process and event loop. Made when needed."""
    key = (deployment, asyncio.get_running_loop())
    placer = _placers().get(key)
    if placer is None or placer.config != config:
        if placer is not None:  # the deployment has got other settings
            placer.closing = asyncio.create_task(placer.close())
        placer = _placers()[key] = Placer(deployment, config)
    return placer
