"""The load of every worker, as it is and with one more prompt."""

from __future__ import annotations

from preble.core.types import Request
from preble.prompts.endpoints import Fields
from preble.selection.prompts import ClientRequest
from preble.selection.schemas import DEFAULT, ModelLoad, OverlapScores, WorkerLoad, WorkerOverlap
from preble.selection.workers import Workers
from preble.serving import Serving


class Loads:
    """The loads of the workers of one serving room."""

    def __init__(self, serving: Serving, workers: Workers) -> None:
        self._serving = serving
        self._workers = workers

    def by_model(self, model_name: str | None) -> list[ModelLoad]:
        """Return what every worker has to do, by model."""
        models = self._serving.replicas.models() if model_name is None else (model_name,)
        return [
            ModelLoad(model, DEFAULT, self._loads(model), self._serving.num_waiting)
            for model in sorted(models)
            if any(self._workers.live(model))
        ]

    async def with_prompt(self, asked: ClientRequest) -> list[WorkerLoad]:
        """Return what every worker would have to do with this prompt."""
        request, model = await self.request(asked)
        return self._loads(model, request)

    async def overlap(self, asked: ClientRequest) -> OverlapScores:
        """Return how much of a prompt each worker has cached."""
        request, model = await self.request(asked)
        found = [
            (live.info.spec.block_size, worker, self._serving.scheduler.matched_tokens(replica_id, request))
            for replica_id, worker, live in self._workers.live(model)
        ]
        block_size = found[0][0] if found else 16
        workers = [WorkerOverlap(worker.worker_id, worker.dp_rank, matched // size) for size, worker, matched in found]
        return OverlapScores(block_size, request.num_prompt_tokens // block_size, workers)

    async def request(self, asked: ClientRequest) -> tuple[Request, str | None]:
        """Return the scheduler's request for a prompt that is not placed, and its model. Raises: RequestError."""
        endpoint, headers, body, caller = asked
        with self._serving.ids.taken({}) as request_id:
            if isinstance(body, Fields):
                parsed = self._serving.take(endpoint, headers, body, request_id, caller)
            else:
                parsed = await self._serving.parse(endpoint, headers, body, request_id, caller)
            return await self._serving.tokenize(parsed), parsed.fields.model

    def _loads(self, model: str | None, request: Request | None = None) -> list[WorkerLoad]:
        scheduler, loads = self._serving.scheduler, []
        states = scheduler.snapshot().replicas
        for replica_id, worker, live in self._workers.live(model):
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
