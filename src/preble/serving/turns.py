"""Requests of tenants wait for their turn here, and are placed when it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import inf

from preble.config import QueueConfig
from preble.core.admission.admission import FairAdmission
from preble.core.admission.fair_queue import QueueSettings, TurnRefused
from preble.core.types import ReplicaId, Request, RequestId, Target
from preble.core.types.life import Ended, Fact, FirstToken, Moved, Started
from preble.errors import Overloaded, PrebleError, RequestError
from preble.rules.key_limits import KeyLimits
from preble.serving.placed import LocalPlaced
from preble.serving.placements import Dispatcher
from preble.serving.terms import MAX_WAIT, Terms, rank_of

_PROMISING_S = 60.0
_LOOK_AGAIN_S = 1.0
"""While requests wait, at least this often: nobody reports when a replica's ejection or hold ends."""


@dataclass(slots=True)
class _Waiter:
    request: Request
    terms: Terms
    placed: asyncio.Future[LocalPlaced]


class Turns:
    """Drives the fair queue of the core: with requests, with what happens to them, and with the event loop's clock.

    Requests without a tenant, which all are where no key is asked for, are placed at once, but for those with a target,
    and all that come within `_PROMISING_S` of one: they wait here, so that what is urgent need not wait in a replica.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        config: QueueConfig,
        limits: KeyLimits,
        *,
        max_waiting: int,
    ) -> None:
        self._admission = FairAdmission(dispatcher.placements.scheduler.cost_model)
        self.configure(config, max_waiting=max_waiting)
        self._limits = limits
        self._dispatcher = dispatcher
        self.copies = dispatcher.placements.copies
        self._numbers = dispatcher.placements.telemetry.numbers
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[RequestId, _Waiter] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._taking: AbstractSet[ReplicaId] = frozenset()
        self._promising_until = -inf
        dispatcher.placements.listen(self, Started, FirstToken, Moved, Ended)
        dispatcher.replicas.listen(self._note_replicas)

    def configure(self, config: QueueConfig, *, max_waiting: int) -> None:
        """Use other settings from now on. Requests that wait keep their rank and the time by which they must go."""
        self._config = config
        self._admission.configure(QueueSettings(max_waiting, config.max_wait_s, config.credit_s), config.depth_s)

    @property
    def admission(self) -> FairAdmission:
        """What the group of gateways shares of the turns: who has used how much."""
        return self._admission

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._admission.num_waiting

    def waiting(self) -> Iterator[tuple[str, str, float]]:
        """Yield, for each request that waits, its model as metrics name it, the base model, and its GPU time as
        estimated.
        """
        replicas = self._dispatcher.replicas
        for request_id, waiter in self._waiters.items():
            model = replicas.label(waiter.terms.model)
            yield model, replicas.of_model(model or None).base_model, self._admission.cost_s(request_id)

    def used_s(self, tenant: str) -> float:
        """Return the GPU time that counts as used by a tenant, divided by its weight."""
        return self._admission.used_s(tenant)

    @property
    def waiting_s(self) -> float:
        """GPU time of the requests that wait for their turn, as estimated."""
        return self._admission.waiting_s

    def takes_turns(self, terms: Terms) -> bool:
        """Return whether a request has to wait for its turn."""
        if not self._config.enabled:
            return False
        if terms.caller.tenant or _has_target(terms):
            return True
        return self._loop.time() < self._promising_until

    async def place(self, request: Request, terms: Terms) -> LocalPlaced:
        """Wait for the request's turn, if it takes turns, then place it, and wait for its copy, if it has one.

        Raises: Overloaded: it cannot have its turn in time, or its target cannot be kept. RequestError: a header is
        wrong. NoReplicaError, PromptTooLong, UnknownModel: as `Dispatcher.place`.
        """
        if self.takes_turns(terms):
            placed = await self._place_at_its_turn(request, terms)
        else:
            placed = self.place_at_once(request, terms)
        return placed if placed.placement.transfer is None else await self.copies.carry_out(placed)

    async def _place_at_its_turn(self, request: Request, terms: Terms) -> LocalPlaced:
        start_by = None if (target := terms.target) is None else self._promise(request, terms, target)
        tokens, came_at = request.num_prompt_tokens, self._loop.time()
        self._limits.charge(terms.caller, tokens, came_at)
        try:
            placed = await self._place_in_turn(request, terms, start_by)
        except (PrebleError, asyncio.CancelledError):
            self._limits.charge(terms.caller, -tokens, self._loop.time())  # it was not served
            raise
        self._numbers.observe("preble_queueing_seconds", placed.model, value=placed.placed_at - came_at)
        return placed

    def place_at_once(self, request: Request, terms: Terms) -> LocalPlaced:
        """Place a request that takes no turns.

        Raises: NoReplicaError, PromptTooLong, UnknownModel. Overloaded: its target cannot be kept.
        """
        if _has_target(terms) and (target := terms.target) is not None:
            self._promise(request, terms, target)
        placed = self._dispatcher.place(request, terms)
        if terms.caller.limits is not None:
            self._limits.charge(terms.caller, request.num_prompt_tokens, placed.placed_at)
        self._numbers.observe("preble_queueing_seconds", placed.model, value=0.0)
        return placed

    def _promise(self, request: Request, terms: Terms, target: Target) -> float | None:
        """Let the request have its target, and return by when it must go for that; None where it could not even be kept
        if nothing waited. Such a request is served as it comes, where next to nothing waits.

        Raises: Overloaded: it cannot be kept now, but perhaps later. Others: as `Dispatcher.place`.
        """
        now = self._loop.time()
        self._promising_until = now + _PROMISING_S
        request.promise(target, now if terms.arrived_at is None else min(terms.arrived_at, now))
        forecast = self._dispatcher.forecast(request, terms)
        if (wait_s := forecast.refused_for_s(request, now)) > 0.0:
            raise self._too_late(terms, wait_s)
        return forecast.start_by(request) if forecast.is_possible(request, now) else None

    def _too_late(self, terms: Terms, late_s: float) -> Overloaded:
        label = self._dispatcher.replicas.label(terms.model)
        self._dispatcher.placements.telemetry.target_refused(terms, label)
        text = f"no replica can keep this request's target now; perhaps in {late_s:.1f} s"
        return Overloaded(text, retry_after_s=late_s)

    async def _place_in_turn(self, request: Request, terms: Terms, start_by: float | None) -> LocalPlaced:
        caller = terms.caller
        rank, max_wait_s = rank_of(terms, self._config.classes), _max_wait_s(terms.max_wait)
        able = self._dispatcher.replicas.able_to_serve(request, terms.model)
        future: asyncio.Future[LocalPlaced] = self._loop.create_future()
        self._waiters[request.request_id] = _Waiter(request, terms, future)
        self._admission.set_weight(caller.tenant, caller.weight)
        self._admission.use(self._dispatcher.placements.scheduler.cost_model)
        refused = self._admission.offer(
            request.request_id,
            caller.tenant,
            request.num_prompt_tokens,
            self._loop.time(),
            rank=rank,
            kind=able,
            max_wait_s=max_wait_s,
            start_by=start_by,
        )
        self._refuse(refused)
        self._call_up()
        try:
            return await future
        except asyncio.CancelledError:
            self._give_up(request.request_id, future)
            raise

    def _give_up(self, request_id: RequestId, future: asyncio.Future[LocalPlaced]) -> None:
        """The client has gone: it may have been placed in this very moment."""
        self._waiters.pop(request_id, None)
        self._admission.withdraw(request_id)
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().cancelled()

    # what happens to replicas and to requests that were placed

    def on(self, placed: LocalPlaced, fact: Fact, now: float) -> None:
        """Note what takes room at a replica or makes some, and charge a key for its answers."""
        request_id = placed.placement.request_id
        if isinstance(fact, Started | Moved):
            if self.takes_turns(placed.terms):
                tenant, streams = placed.terms.caller.tenant, placed.terms.streams
                self._admission.placed(placed.placement, tenant, now, streams=streams)
            return
        if isinstance(fact, Ended) and placed.terms.caller.limits is not None:
            self._limits.charge(placed.terms.caller, fact.output_tokens or 0, now)
        if request_id in self._admission.running:
            if isinstance(fact, Ended):
                self._admission.ended(request_id, fact.output_tokens or 0)
            elif isinstance(fact, FirstToken):
                self._admission.first_token(request_id)
        if self._waiters:
            self._call_up()

    def _note_replicas(self) -> None:
        """Replicas have come or gone, or take requests again or no more."""
        replicas = self._dispatcher.replicas
        taking = replicas.keys() - replicas.held_back
        for replica_id in taking - self._taking:
            self._admission.add_replica(replica_id)
        for replica_id in self._taking - taking:
            self._admission.remove_replica(replica_id)
        if taking != self._taking:
            self._taking = taking
            if self._waiters:
                self._call_up()

    # inside

    def _call_up(self) -> None:
        """Place whoever's turn it is, now that something has changed."""
        now = self._loop.time()
        self._refuse(self._admission.expire(now))
        while (request_id := self._admission.next(now, self._where)) is not None:
            self._place(request_id)
        self._arm(now)

    def _where(self, request_id: RequestId) -> frozenset[ReplicaId]:
        """Return the replicas that a request could go to now. Those to keep away from count only where there are no
        others.
        """
        waiter = self._waiters[request_id]
        try:
            able = self._dispatcher.replicas.able_to_serve(waiter.request, waiter.terms.model)
        except RequestError:
            return frozenset()
        return able - self._dispatcher.placements.ejection.avoided(self._loop.time()) or able

    def _place(self, request_id: RequestId) -> None:
        waiter = self._waiters.pop(request_id, None)
        if waiter is None or waiter.placed.done():
            return
        try:
            waiter.placed.set_result(self._dispatcher.place(waiter.request, waiter.terms))
        except Exception as error:  # noqa: BLE001 (it is that request's failure, not of the one that made room)
            waiter.placed.set_exception(error)

    def _refuse(self, refused: list[TurnRefused]) -> None:
        for refusal in refused:
            waiter = self._waiters.pop(refusal.request_id, None)
            if waiter is None or waiter.placed.done():
                continue
            if waiter.terms.target is not None:
                waiter.placed.set_exception(self._too_late(waiter.terms, refusal.retry_after_s))
            else:
                text = "this request cannot have its turn in time; other requests of this key go first"
                waiter.placed.set_exception(Overloaded(text, retry_after_s=refusal.retry_after_s))

    def _arm(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        when = self._admission.next_timer(now)
        if self._waiters:
            when = min(when or inf, now + _LOOK_AGAIN_S)
        self._timer = None if when is None else self._loop.call_at(when, self._call_up)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()


def _has_target(terms: Terms) -> bool:
    return terms.ttft_target_s is not None or terms.tpot_target_s is not None


def _max_wait_s(given: str | None) -> float | None:
    """Raises: RequestError: the header is no number of seconds."""
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 1e9:
        raise RequestError(f"{MAX_WAIT.decode()}: {given[:50]!r} is no number of seconds")
    return seconds
