"""Workers: the replicas under the numbers by which callers know them."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from preble.config import ReplicaConfig
from preble.core.types import ReplicaId
from preble.errors import ConfigError, RequestError
from preble.selection.schemas import DEFAULT, Worker, WorkerRecord, WorkerRequest
from preble.serving import LiveReplica, MemberRow, Serving
from preble.web.urls import server_url


class UnknownWorker(RequestError):
    """No worker has this number."""

    status = 404
    code = "worker_not_found"


def number_of(url: str) -> int:
    """Return the number of a replica that nobody has registered: the same after each start, exact in JSON.

    >>> number_of("http://10.0.0.1:8000") == number_of("http://10.0.0.1:8000") < 2**48
    True
    """
    return int.from_bytes(blake2b(url.encode(), digest_size=6).digest(), "big")


class Workers:
    """Every replica of the serving room as a worker, whoever named it."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._given: dict[str, int] = {}
        """Numbers that callers chose, by URL."""

    def register(self, wanted: WorkerRequest) -> WorkerRecord:
        """Watch a replica under this number. A number that stood for another one stands for this one now.

        Raises: RequestError: the endpoint is unusable. Conflict: the configuration names it with other settings.
        """
        try:
            url = server_url(wanted.endpoint)
            known = self._url_of(wanted.worker_id)
            replica = ReplicaConfig(url, kv_events=wanted.kv_events_endpoint, kv_events_replay=wanted.replay_endpoint)
            self._serving.add_replica(replica)
        except ConfigError as error:
            raise RequestError(str(error), param="endpoint") from error
        self._given[url] = wanted.worker_id
        if known not in (None, url):
            self._leave(known)
        return self._record(self._serving.members.row(url))

    def remove(self, worker_id: int) -> WorkerRecord:
        """Leave a worker once nothing runs there. Raises: UnknownWorker."""
        url = self._url_of(worker_id)
        if url is None:
            raise self._unknown(worker_id)
        record = self._record(self._serving.members.row(url))
        self._leave(url)
        return record

    def records(self) -> list[WorkerRecord]:
        """Return every worker, live or not."""
        return [self._record(row) for row in self._serving.members]

    def live(self, model: str | None = None) -> Iterator[tuple[ReplicaId, Worker, LiveReplica]]:
        """Yield the live workers, each rank on its own. `model`: those that serve it; None for all."""
        for replica_id, live in self._serving.replicas.items():
            if model is None or model in live.info.models:
                yield replica_id, self.worker_of(live.engine.url, live.engine.rank), live

    def worker_of(self, url: str, rank: int | None) -> Worker:
        """Return how callers know a replica."""
        return Worker(self._given.get(url, number_of(url)), rank or 0)

    def others(self, worker_ids: list[int] | None, pinned: Worker | None) -> frozenset[ReplicaId]:
        """Return the live replicas that must not get a request. `worker_ids`, `pinned`: None for no rule.

        Raises: UnknownWorker.
        """
        allowed = None if worker_ids is None else frozenset(worker_ids)
        asked = (allowed or frozenset()) | ({pinned.worker_id} if pinned is not None else frozenset())
        if unknown := asked - {self.worker_of(row.url, None).worker_id for row in self._serving.members}:
            raise self._unknown(min(unknown))
        return frozenset(
            replica_id
            for replica_id, worker, _ in self.live()
            if (allowed is not None and worker.worker_id not in allowed) or pinned not in (None, worker)
        )

    def _leave(self, url: str) -> None:
        self._given.pop(url, None)
        self._serving.members.remove(url, at_once=False)

    def _url_of(self, worker_id: int) -> str | None:
        urls = (row.url for row in self._serving.members)
        return next((url for url in urls if self.worker_of(url, None).worker_id == worker_id), None)

    def _unknown(self, worker_id: int) -> UnknownWorker:
        return UnknownWorker(f"no worker {worker_id} is registered; GET /workers lists those there are")

    def _record(self, row: MemberRow) -> WorkerRecord:
        live = [one for replica_id, one in self._serving.replicas.items() if replica_id in row.replicas]
        spec = live[0].info.spec if live else None
        total = spec.kv_capacity_tokens if spec is not None else None
        states = {"live": "schedulable", "joining": "incomplete", "down": "unschedulable"}
        return WorkerRecord(
            worker_id=self.worker_of(row.url, None).worker_id,
            model_name=next((name for one in live for name in one.info.models), DEFAULT),
            routing_group=DEFAULT,
            lifecycle=states.get(row.state, "draining"),  # type: ignore[arg-type]
            endpoint=row.url,
            block_size=spec.block_size if spec is not None else None,
            data_parallel_start_rank=0,
            data_parallel_size=max(1, len(live)),
            total_kv_blocks=total // spec.block_size if spec is not None and total is not None else None,
            not_schedulable_reasons=[row.last_error] if row.last_error and row.state != "live" else [],
        )
