"""What the selection service does for a caller: one method for each route."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from weakref import WeakSet

from msgspec import UNSET
from msgspec.structs import replace

from preble.core.types import Placement, ReplicaId
from preble.core.types.life import Alive, Ended, Outcome, Progress, Report
from preble.errors import NoReplicaError, prompt_too_long
from preble.gateway.server import Gateway
from preble.reservations import Reservation, Reservations, UnknownReservation
from preble.rules.callers import Caller
from preble.selection.loads import Loads
from preble.selection.prompts import ClientRequest, body_in, request_in
from preble.selection.schemas import (
    DEFAULT,
    EndRequest,
    Overlap,
    PromptRequest,
    ReservationRequest,
    ReservationRow,
    SelectRequest,
    SelectResponse,
    Worker,
)
from preble.selection.workers import Workers
from preble.serving import ended

_FAILURES = MappingProxyType(
    {
        "unreachable": Ended(Outcome.ENGINE_REFUSED, text="the carrier could not reach it"),
        "broken": Ended(Outcome.ENGINE_GONE, text="its connection to the carrier broke"),
        "timeout": Ended(Outcome.ENGINE_TIMEOUT, text="it did not answer the carrier in time"),
        "cancelled": Ended(Outcome.ABORTED),
    }
)
"""The ends that callers report as an `error`."""


class SelectionService:
    """Selections and reservations of one running gateway. `workers`: its replicas; `loads`: what they have to do."""

    def __init__(self, gateway: Gateway) -> None:
        config = gateway.config.selection
        self._gateway = gateway
        self._serving = gateway.serving
        self._hold_s = config.hold_s
        self._loop = asyncio.get_running_loop()
        self.workers = Workers(self._serving)
        self.loads = Loads(self._serving, self.workers)
        self.reservations = Reservations(self._serving, config.lease_s)
        self._selected: WeakSet[Reservation] = WeakSet()
        """Selected under an id, and not reserved yet."""

    # -- choosing -----------------------------------------------------------------------------------------------------

    async def select(self, asked: SelectRequest, caller: Caller) -> SelectResponse:
        """Choose a worker. Under an id, its load counts until `hold_s` is over or it is reserved; else not at all."""
        if asked.selection_id is not None:
            asked.lease_s = self._hold_s
        one = await self._reserve(asked, caller, replaces=True)
        if asked.selection_id is None:
            self.reservations.cancel(one.reservation_id)
        else:
            self._selected.add(one)
        return self._answer(one, asked, is_held=asked.selection_id is not None)

    async def select_and_reserve(self, asked: SelectRequest, caller: Caller) -> SelectResponse:
        """Choose a worker and reserve it."""
        return self._answer(await self._reserve(asked, caller), asked, is_held=True)

    async def reserve(self, asked: ReservationRequest, caller: Caller) -> ReservationRow:
        """Reserve what was selected, or a worker of the caller's choice."""
        if asked.worker_id is None:
            one = self.reservations.get(asked.selection_id)
            if one is None or one not in self._selected:
                text = (
                    f"no selection {asked.selection_id[:200]!r} is pending: it is reserved already, or its time is over"
                )
                raise UnknownReservation(f"{text}; give worker_id and the prompt to reserve without one")
            self.report(asked.selection_id, Alive(asked.lease_s or self.reservations.lease_s))
        else:
            pinned = Worker(asked.worker_id, asked.dp_rank) if asked.dp_rank is not None else None
            allowed = [asked.worker_id]
            one = await self._placed(asked, caller, asked.selection_id, asked.lease_s, allowed, pinned, replaces=True)
        self._selected.discard(one)
        return self.row(one)

    async def _give_way(
        self, selection_id: str, asked: ClientRequest, others: Callable[[], frozenset[ReplicaId]]
    ) -> None:
        """Let a selection that is still pending gives way to another one under its id, unless no worker takes that one
        now.

        The other one gets its room and its id, so it is gone even if no worker is left a moment later.
        """
        if self.reservations.get(selection_id) in self._selected:
            request, model = await self.loads.request(asked)
            replicas = self._serving.replicas
            if request.num_prompt_tokens > (longest := replicas.of_model(model).longest_prompt):
                raise prompt_too_long(request.num_prompt_tokens, longest)
            if not replicas.able_to_serve(dataclasses.replace(request, avoid=request.avoid | others()), model):
                raise NoReplicaError("no allowed worker takes this prompt now; the selection of this id stays pending")
            if self.reservations.get(selection_id) in self._selected:
                self.reservations.cancel(selection_id)

    async def _reserve(self, asked: SelectRequest, caller: Caller, *, replaces: bool = False) -> Reservation:
        allowed, pinned = asked.allowed_worker_ids, asked.pinned_worker
        return await self._placed(asked, caller, asked.selection_id, asked.lease_s, allowed, pinned, replaces=replaces)

    async def _placed(
        self,
        asked: PromptRequest,
        caller: Caller,
        selection_id: str | None,
        lease_s: float | None,
        allowed: list[int] | None,
        pinned: Worker | None,
        *,
        replaces: bool,
    ) -> Reservation:
        others = partial(self.workers.others, allowed, pinned)
        others()  # an unknown worker is an error before anything is taken
        request = self.asked_about(asked, caller)
        if replaces and selection_id is not None:
            await self._give_way(selection_id, request, others)
        return await self.reservations.reserve(*request, reservation_id=selection_id, avoid=others, lease_s=lease_s)

    def asked_about(self, asked: PromptRequest, caller: Caller) -> ClientRequest:
        """Return the request that a caller asks about. Raises: RequestError."""
        return request_in(asked, caller, self._gateway.keys)

    def _answer(self, one: Reservation, asked: SelectRequest, *, is_held: bool) -> SelectResponse:
        placement, engine = one.placement, one.engine
        worker, live = self.workers.worker_of(engine.url, engine.rank), self._serving.replicas.get(placement.replica_id)
        sent = one.request.body
        one.forget_prompt()
        return SelectResponse(
            selection_id=one.reservation_id if is_held else UNSET,
            isl_tokens=placement.num_prompt_tokens,
            model_name=one.request.fields.model or DEFAULT,
            worker_id=worker.worker_id,
            dp_rank=worker.dp_rank,
            endpoint=engine.url,
            block_size=live.info.spec.block_size if live is not None else 0,
            overlap=_overlap(placement, worker.dp_rank),
            effective_prefill_tokens=placement.num_prompt_tokens - placement.matched_tokens,
            reason=placement.reason,
            request_id=placement.request_id,
            lease_s=one.lease_s if is_held else UNSET,
            body=sent.decode() if asked.body is not UNSET and sent != body_in(asked) else UNSET,
            candidates=list(placement.candidates) if asked.explain else UNSET,
        )

    # -- reports ------------------------------------------------------------------------------------------------------

    def row(self, one: Reservation) -> ReservationRow:
        """Return a reservation as callers see it."""
        worker = self.workers.worker_of(one.engine.url, one.engine.rank)
        return ReservationRow(
            selection_id=one.reservation_id,
            worker_id=worker.worker_id,
            dp_rank=worker.dp_rank,
            endpoint=one.engine.url,
            prefill_complete=one.has_begun,
            output_tokens=one.output_tokens,
            lease_s=one.lease_s,
            model_name=one.request.fields.model or DEFAULT,
            lost=UNSET if one.loss is None else one.loss.reason or "it has left",
        )

    def reservation(self, selection_id: str) -> ReservationRow:
        """Return one that is held. Raises: UnknownReservation."""
        return self.row(self.reservations[selection_id])

    def output_block(self, selection_id: str) -> ReservationRow:
        """Note one more KV block of output. Raises: UnknownReservation."""
        one = self.reservations[selection_id]
        live = self._serving.replicas.get(one.placement.replica_id)
        block_size = live.info.spec.block_size if live is not None else 1
        return self.report(selection_id, Progress(one.output_tokens + block_size))

    def end(self, selection_id: str, report: EndRequest) -> ReservationRow:
        """Note that the request is over. Raises: UnknownReservation."""
        failure = None if report.error is None else _FAILURES[report.error]
        end = failure or ended(status=report.status, retry_after_s=report.retry_after_s)
        tokens = {"output_tokens": report.output_tokens, "cached_tokens": report.cached_tokens}
        return self.report(selection_id, replace(end, **tokens))

    def free(self, selection_id: str) -> ReservationRow:
        """End the request: well if its prompt was computed, else cancelled. Raises: UnknownReservation."""
        is_over_well = self.reservations[selection_id].has_begun
        return self.report(selection_id, Ended(Outcome.OK if is_over_well else Outcome.ABORTED))

    def report(self, selection_id: str, fact: Report) -> ReservationRow:
        """Note what has happened to the request. Raises: UnknownReservation."""
        return self.row(self.reservations.report(selection_id, fact, self._loop.time()))


def _overlap(placement: Placement, rank: int) -> Overlap:
    """Return what is cached where; the tiers beyond the engine's memory are not told apart."""
    chosen = (one for one in placement.candidates if one.replica_id == placement.replica_id)
    loaded = next((one.loaded_tokens for one in chosen), 0)
    matched, gpu = placement.matched_tokens, placement.matched_tokens - loaded
    return Overlap(longest_matched=matched, gpu=gpu, dp={str(rank): gpu}, cpu=matched, disk=matched)
