"""What the selection service does for a caller: one method for each route."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakSet

import msgspec
from msgspec import UNSET

from preble.core.types import Placement, ReplicaId, Request, pack_tokens
from preble.errors import EngineError, EngineGone, EngineRefused, EngineTimeout, RequestError
from preble.gateway.http.keys import UNAUTHORIZED
from preble.gateway.server import Gateway
from preble.reservations import Reservation, Reservations, UnknownReservation
from preble.selection.messages import (
    DEFAULT,
    EndRequest,
    ModelLoad,
    Overlap,
    OverlapScores,
    ProgressRequest,
    PromptRequest,
    RenewRequest,
    ReservationRequest,
    ReservationRow,
    SelectRequest,
    SelectResponse,
    Worker,
    WorkerLoad,
    WorkerOverlap,
)
from preble.selection.workers import Workers
from preble.serving import COMPLETIONS, Caller, Endpoint, Fields, endpoint_of


class UnknownClientKey(RequestError):
    """The client's headers have a key that is not valid."""

    status = 401
    code = UNAUTHORIZED.code


class SelectionService:
    """Selections and reservations of one running gateway. `workers`: its replicas."""

    def __init__(self, gateway: Gateway) -> None:
        config = gateway.config.selection
        self._gateway = gateway
        self._serving = gateway.serving
        self._hold_s = config.hold_s
        self._loop = asyncio.get_running_loop()
        self.workers = Workers(self._serving)
        self.reservations = Reservations(self._serving, config.lease_s)
        self._selected: WeakSet[Reservation] = WeakSet()
        """Selected under an id, and not reserved yet."""

    # -- choosing -----------------------------------------------------------------------------------------------------

    async def select(self, asked: SelectRequest, caller: Caller) -> SelectResponse:
        """Choose a worker. Under an id, its load counts until `hold_s` is over or it is reserved; else not at all."""
        if asked.selection_id is not None:
            self._replace(asked.selection_id)
            asked.lease_s = self._hold_s
        one = await self._reserve(asked, caller)
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
            self.reservations.renew(asked.selection_id, self._loop.time(), asked.lease_s or self.reservations.lease_s)
        else:
            self._replace(asked.selection_id)
            pinned = Worker(asked.worker_id, asked.dp_rank) if asked.dp_rank is not None else None
            one = await self._placed(asked, caller, asked.selection_id, asked.lease_s, [asked.worker_id], pinned)
        self._selected.discard(one)
        return self.row(one)

    def _replace(self, selection_id: str) -> None:
        """A selection that is still pending gives way to another one under its id."""
        if self.reservations.get(selection_id) in self._selected:
            self.reservations.cancel(selection_id)

    async def _reserve(self, asked: SelectRequest, caller: Caller) -> Reservation:
        return await self._placed(
            asked, caller, asked.selection_id, asked.lease_s, asked.allowed_worker_ids, asked.pinned_worker
        )

    async def _placed(
        self,
        asked: PromptRequest,
        caller: Caller,
        selection_id: str | None,
        lease_s: float | None,
        allowed: list[int] | None,
        pinned: Worker | None,
    ) -> Reservation:
        endpoint, headers, body, caller = self._prompt(asked, caller)
        others = self._others(allowed, pinned)
        others()  # an unknown worker is an error before anything is taken
        return await self.reservations.reserve(
            endpoint, headers, body, caller, reservation_id=selection_id, avoid=others, lease_s=lease_s
        )

    def _others(self, allowed: list[int] | None, pinned: Worker | None) -> Callable[[], frozenset[ReplicaId]]:
        return lambda: self.workers.others(allowed, pinned)

    def _prompt(
        self, asked: PromptRequest, caller: Caller
    ) -> tuple[Endpoint, dict[bytes, bytes], bytes | Fields, Caller]:
        """Raises: RequestError: there is no prompt, or two. UnknownClientKey."""
        headers = {name.lower().encode(): value.encode() for name, value in asked.headers.items()}
        if headers.keys() & {b"authorization", b"x-api-key"}:
            client = self._gateway.keys.caller(headers)
            if client is None:
                raise UnknownClientKey("the client's key in `headers` is not valid", param="headers")
            caller = client
        if (asked.token_ids is None) == (asked.path is None):
            raise RequestError("give either token_ids, or path and body of the client's request", param="token_ids")
        if asked.token_ids is not None:
            return COMPLETIONS, headers, self._fields(asked, asked.token_ids, caller), caller
        endpoint = endpoint_of(asked.path or "")
        if endpoint is None or asked.body is UNSET:
            raise RequestError("path and body are those of a POST to an engine, such as /v1/completions", param="path")
        return endpoint, headers, _given(asked), caller

    def _fields(self, asked: PromptRequest, token_ids: list[int], caller: Caller) -> Fields:
        if not token_ids:
            raise RequestError("token_ids is empty", param="token_ids")
        return Fields(
            model=asked.lora_name or model_of(asked.model_name),
            prompts=[pack_tokens(token_ids)],
            max_output_tokens=asked.expected_output_tokens,
            cache_salt=caller.cache_salt(asked.cache_salt),
        )

    def _answer(self, one: Reservation, asked: SelectRequest, *, is_held: bool) -> SelectResponse:
        placement, engine = one.placement, one.engine
        worker, live = self.workers.worker_of(engine.url, engine.rank), self._serving.replicas.get(placement.replica_id)
        sent = one.request.body
        return SelectResponse(
            selection_id=one.reservation_id if is_held else UNSET,
            isl_tokens=placement.num_prompt_tokens,
            model_name=one.request.model or DEFAULT,
            worker_id=worker.worker_id,
            dp_rank=worker.dp_rank,
            endpoint=engine.url,
            block_size=live.info.spec.block_size if live is not None else 0,
            overlap=_overlap(placement, worker.dp_rank),
            effective_prefill_tokens=placement.num_prompt_tokens - placement.matched_tokens,
            reason=placement.reason,
            request_id=placement.request_id,
            lease_s=one.lease_s if is_held else UNSET,
            body=sent.decode() if asked.body is not UNSET and sent != _given(asked) else UNSET,
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
            model_name=one.request.model or DEFAULT,
            lost=one.lost or UNSET,
        )

    def reservation(self, selection_id: str) -> ReservationRow:
        """Return one that is held. Raises: UnknownReservation."""
        return self.row(self.reservations[selection_id])

    def prefill_complete(self, selection_id: str) -> ReservationRow:
        """The prompt is computed. Raises: UnknownReservation."""
        return self.row(self.reservations.prefill_complete(selection_id, self._loop.time()))

    def output_block(self, selection_id: str) -> ReservationRow:
        """One more KV block of output. Raises: UnknownReservation."""
        one = self.reservations[selection_id]
        live = self._serving.replicas.get(one.placement.replica_id)
        block_size = live.info.spec.block_size if live is not None else 1
        return self.progress(selection_id, ProgressRequest(one.output_tokens + block_size))

    def progress(self, selection_id: str, report: ProgressRequest) -> ReservationRow:
        """The answer so far. Raises: UnknownReservation."""
        now = self._loop.time()
        return self.row(self.reservations.progress(selection_id, now, report.output_tokens, report.cached_tokens))

    def renew(self, selection_id: str, report: RenewRequest) -> ReservationRow:
        """The caller lives. Raises: UnknownReservation."""
        return self.row(self.reservations.renew(selection_id, self._loop.time(), report.lease_s))

    def end(self, selection_id: str, report: EndRequest) -> ReservationRow:
        """The request is over. Raises: UnknownReservation."""
        if report.error == "cancelled":
            if report.output_tokens is not None:
                self.progress(selection_id, ProgressRequest(report.output_tokens, report.cached_tokens))
            return self.row(self.reservations.cancel(selection_id))
        return self.row(
            self.reservations.end(
                selection_id,
                output_tokens=report.output_tokens,
                cached_tokens=report.cached_tokens,
                status=report.status,
                error=_error(report.error, self.reservations[selection_id]),
                retry_after_s=report.retry_after_s,
            )
        )

    def free(self, selection_id: str) -> ReservationRow:
        """The request is over: well if its prompt was computed, else cancelled. Raises: UnknownReservation."""
        is_over_well = self.reservations[selection_id].has_begun
        return self.end(selection_id, EndRequest(error=None if is_over_well else "cancelled"))

    # -- looking ------------------------------------------------------------------------------------------------------

    def loads(self, model_name: str | None) -> list[ModelLoad]:
        """Return what every worker has to do, by model."""
        models = self._serving.replicas.models() if model_name is None else (model_name,)
        return [
            ModelLoad(model, DEFAULT, self._loads(model), self._serving.num_waiting)
            for model in sorted(models)
            if any(self.workers.live(model))
        ]

    async def potential_loads(self, asked: PromptRequest, caller: Caller) -> list[WorkerLoad]:
        """Return what every worker would have to do with this prompt."""
        request, model = await self._request(asked, caller)
        return self._loads(model, request)

    async def overlap_scores(self, asked: PromptRequest, caller: Caller) -> OverlapScores:
        """Return how much of a prompt each worker has cached."""
        request, model = await self._request(asked, caller)
        found = [
            (live.info.spec.block_size, worker, self._serving.scheduler.matched_tokens(replica_id, request))
            for replica_id, worker, live in self.workers.live(model)
        ]
        block_size = found[0][0] if found else 16
        workers = [WorkerOverlap(worker.worker_id, worker.dp_rank, matched // size) for size, worker, matched in found]
        return OverlapScores(block_size, request.num_prompt_tokens // block_size, workers)

    async def _request(self, asked: PromptRequest, caller: Caller) -> tuple[Request, str | None]:
        """Return the scheduler's request for a prompt that is not placed, and its model."""
        endpoint, headers, body, caller = self._prompt(asked, caller)
        with self._serving.request_id({}) as request_id:
            if isinstance(body, Fields):
                parsed = self._serving.take(endpoint, headers, body, request_id, caller)
            else:
                parsed = await self._serving.parse(endpoint, headers, body, request_id, caller)
            return await self._serving.tokenize(parsed), parsed.model

    def _loads(self, model: str | None, request: Request | None = None) -> list[WorkerLoad]:
        scheduler, loads = self._serving.scheduler, []
        states = scheduler.snapshot().replicas
        for replica_id, worker, live in self.workers.live(model):
            state, size = states[replica_id], live.info.spec.block_size
            missed = blocks = 0
            if request is not None:
                missed = request.num_prompt_tokens - scheduler.matched_tokens(replica_id, request)
                blocks = -(-request.num_prompt_tokens // size)
            loads.append(
                WorkerLoad(
                    worker.worker_id,
                    worker.dp_rank,
                    state.waiting_prefill_tokens + missed,
                    state.in_use_tokens // size + blocks,
                    state.num_requests,
                    state.load_s,
                )
            )
        return loads


def _given(asked: PromptRequest) -> bytes:
    """Return the client's body: a JSON object as it came, or a string's content."""
    body = bytes(asked.body) if asked.body is not UNSET else b""
    return msgspec.json.decode(body, type=str).encode() if body[:1] == b'"' else body


def model_of(name: str) -> str | None:
    """Return the model that a caller means; None for any."""
    return None if name == DEFAULT else name


def _overlap(placement: Placement, rank: int) -> Overlap:
    """Which of the tiers beyond the engine's memory has the rest is not told apart."""
    chosen = (one for one in placement.candidates if one.replica_id == placement.replica_id)
    loaded = next((one.loaded_tokens for one in chosen), 0)
    matched, gpu = placement.matched_tokens, placement.matched_tokens - loaded
    return Overlap(longest_matched=matched, gpu=gpu, dp={str(rank): gpu}, cpu=matched, disk=matched)


def _error(name: str | None, one: Reservation) -> EngineError | None:
    replica_id = one.placement.replica_id
    match name:
        case "unreachable":
            return EngineRefused("the carrier could not reach it", replica_id=replica_id)
        case "broken":
            return EngineGone("its connection to the carrier broke", replica_id=replica_id)
        case "timeout":
            return EngineTimeout("it did not answer the carrier in time", replica_id=replica_id)
    return None
