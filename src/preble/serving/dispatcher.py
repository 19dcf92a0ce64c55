"""The dispatcher: chooses each request's replica with the scheduler, and places failed requests again."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import structlog

from preble.config import RetryConfig
from preble.core.types import Placement, ReplicaId, Request
from preble.errors import NoReplicaError, Quarantined
from preble.rules.quarantine import QUARANTINE_S, like_of
from preble.rules.retry_budget import RetryBudget
from preble.serving.placed import LocalPlaced
from preble.serving.placements import Placements
from preble.serving.terms import Terms


class Dispatcher:
    """Places requests. Synchronous: nothing happens between reading the scheduler's state and acting on it."""

    def __init__(self, placements: Placements, retries: RetryConfig | None = None) -> None:
        self.placements = placements
        self.replicas = placements.replicas
        self._scheduler = placements.scheduler
        self._ejection = placements.ejection
        self._telemetry = placements.telemetry
        self.retries = RetryBudget(retries or RetryConfig())
        self._loop = asyncio.get_running_loop()

    def place(self, request: Request, terms: Terms) -> LocalPlaced:
        """Place a request on a replica that serves its model. The caller must end the placement.

        Raises: NoReplicaError, PromptTooLong, UnknownModel. Quarantined: replicas have died of its like.
        """
        self.retries.placed(self._loop.time())
        return self._place(request, terms)

    def _place_again(self, request: Request, terms: Terms, tried: ReplicaId, is_free: bool) -> LocalPlaced:
        """See `Placed.place_again`."""
        now = self._loop.time()
        if not is_free and not self.retries.allows_one(now):
            self._telemetry.retry_denied()
            raise NoReplicaError("too many requests move to other replicas (`retries.share`)")
        again = self._place(_avoiding(request, frozenset((tried,))), terms)
        if not is_free:
            self.retries.placed_again(now)
        self._telemetry.placed_again(tried, again.model)
        return again

    def _place(self, request: Request, terms: Terms) -> LocalPlaced:
        now, started = self._loop.time(), time.perf_counter()
        if self.placements.quarantine:
            self._refuse_deadly(request, terms, now)
        of_model = self.replicas.of_model(terms.model)
        others = of_model.others
        if of_model.base_model != request.model:
            request = dataclasses.replace(request, model=of_model.base_model)
        if held_back := self.replicas.held_back:
            others |= held_back
        placement = self._chosen(request, others, now)
        took_s = time.perf_counter() - started
        try:
            placed = self._placed(request, placement, terms, now)
        except BaseException:
            self._scheduler.on_finish(request.request_id, 0, now)
            raise
        self.placements.start(placed, took_s)
        return placed

    def _refuse_deadly(self, request: Request, terms: Terms, now: float) -> None:
        """Raises: Quarantined: replicas have died of such a request."""
        if died := self.placements.quarantine.held(like_of(request, terms.caller.name), now):
            structlog.get_logger().warning("request_quarantined", request=request.request_id, died=died)
            text = f"two replicas ended while they worked on this request; it is refused for {QUARANTINE_S:g} s"
            raise Quarantined(f"{text}, and so is every one like it")

    def _placed(self, request: Request, placement: Placement, terms: Terms, now: float) -> LocalPlaced:
        replica = self.replicas[placement.replica_id]
        return LocalPlaced(
            placement,
            replica.engine,
            now,
            request=request,
            terms=terms,
            model=terms.model or next(iter(replica.info.models), ""),
            table=self.placements,
            place_again=self._place_again,
        )

    def _chosen(self, request: Request, others: frozenset[ReplicaId], now: float) -> Placement:
        """Place, if possible on a replica that is not ejected. `others`: replicas of other models, or drained."""
        avoided = self._ejection.avoided(now)
        try:
            return self._scheduler.place(_avoiding(request, others | avoided), now)
        except NoReplicaError as error:
            if not avoided:
                raise
            candidates = self.replicas.keys() - others - request.avoid
            held = self._ejection.held(candidates, now)
            if candidates and len(held) == len(candidates):
                text = "every replica asks for time before further requests"
                raise NoReplicaError(text, retry_after_s=min(held.values())) from error
            return self._scheduler.place(_avoiding(request, others | held.keys()), now)


def _avoiding(request: Request, replicas: frozenset[ReplicaId]) -> Request:
    return dataclasses.replace(request, avoid=request.avoid | replicas) if replicas else request
