"""What is read at each scrape: the scheduler's state, the engines' load, the replicas that are watched, the process."""

from __future__ import annotations

import mmap
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from preble import __version__
from preble.build import commit
from preble.core.placing import scheduler as scheduler_module
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.placing.snapshot import ReplicaState
from preble.core.types import ReplicaId
from preble.decisions.writer import LogWriter
from preble.serving.group.group import Group
from preble.serving.replicas.live import LiveReplica
from preble.serving.replicas.rows import MemberRow, SourceRow
from preble.serving.telemetry.numbers import Reading


def of_scheduler(scheduler: GlobalScheduler, log: LogWriter | None = None) -> Iterator[Reading]:
    """Yield the scheduler's state. `log`: the decision log, None where none is kept."""
    state = scheduler.snapshot()
    yield _one("preble_index_bytes", state.num_index_bytes)
    yield _one("preble_index_tokens", state.num_index_tokens)
    yield _one("preble_unindexed_total", state.num_unindexed)
    yield _one("preble_assumed_in_flight", state.num_assumed)
    yield _one("preble_replicated_prefixes", state.num_replicated_prefixes)
    yield _one("preble_cost_factor", state.cost_factors.prefill, "prefill")
    yield _one("preble_cost_factor", state.cost_factors.decode, "decode")
    yield _one("preble_cost_factor", state.cost_factors.link, "link")
    yield _one("preble_load_window_seconds", state.window_s)
    for replica_id, replica in state.replicas.items():
        yield from _of_replica(replica_id, replica)
    if log is not None:
        yield _one("preble_decision_log_lines_total", log.num_written)
        yield _one("preble_decision_log_dropped_total", log.num_dropped)


def _of_replica(replica_id: ReplicaId, replica: ReplicaState) -> Iterator[Reading]:
    yield _one("preble_prompts_queued", 0, replica.model)  # so that there is a series before any waits
    yield _one("preble_work_waiting_seconds", replica.waiting_prefill_s, replica.model)
    yield _one("preble_load_seconds", replica.load_s, replica_id)
    yield _one("preble_waiting_prefill_tokens", replica.waiting_prefill_tokens, replica_id)
    yield _one("preble_waiting_prefill_seconds", replica.waiting_prefill_s, replica_id)
    yield _one("preble_believed_cached_tokens", replica.cached_tokens, replica_id)
    yield _one("preble_in_use_tokens", replica.in_use_tokens, replica_id)
    yield _one("preble_drift_predicted_tokens_total", replica.drift.predicted_tokens, replica_id)
    yield _one("preble_drift_reported_tokens_total", replica.drift.reported_tokens, replica_id)
    yield _one("preble_replica_trusted", replica.trusted, replica_id)
    if replica.kv_capacity_tokens:
        yield _one("preble_kv_capacity_tokens", replica.kv_capacity_tokens, replica_id)
        yield _one("preble_kv_in_use_ratio", replica.in_use_tokens / replica.kv_capacity_tokens, replica_id)


def of_queue(num_admitted: int, waiting: Iterable[tuple[str, str, float]]) -> Iterator[Reading]:
    """Yield prompts between admission and their end, and those that wait for their turn: model, base model, GPU
    seconds.
    """
    yield _one("preble_prompts_admitted", num_admitted)
    for model, base_model, waiting_s in waiting:
        yield _one("preble_prompts_queued", 1, model)
        yield _one("preble_work_waiting_seconds", waiting_s, base_model)


def of_wait(num_waiting: int) -> Iterator[Reading]:
    """Yield prompts that wait for any replica at all; nobody knows which model they will get."""
    if num_waiting:
        yield _one("preble_prompts_queued", num_waiting, "")


def of_engines(replicas: Mapping[ReplicaId, LiveReplica]) -> Iterator[Reading]:
    """Yield the load that engines report, of the replicas that report any."""
    for replica_id, replica in replicas.items():
        if (load := replica.engine_load) is not None:
            yield _one("preble_engine_running", load.running, replica_id)
            yield _one("preble_engine_waiting", load.waiting, replica_id)
            yield _one("preble_engine_kv_tokens", load.kv_tokens, replica_id)


def of_members(rows: Iterable[MemberRow], sources: Iterable[SourceRow]) -> Iterator[Reading]:
    """Yield every replica that is watched with its state, also those that were never up; and the sources that name
    them.
    """
    for row in rows:
        yield _one("preble_replica_state", 1, row.url, row.state)
        yield _one("preble_replica_safe_to_remove", row.safe_to_remove, row.url)
    for source in sources:
        yield _one("preble_source_replicas", source.replicas, source.name)
        yield _one("preble_source_current", source.error is None, source.name)


def of_group(group: Group) -> Iterable[Reading]:
    """Return the other gateways of the cluster."""
    return [
        _one("preble_peers", len(group.peers)),
        _one("preble_peers_connected", group.is_connected),
        _one("preble_peers_warm", group.is_warm),
        _one("preble_peer_messages_total", group.num_told, "told"),
        _one("preble_peer_messages_total", group.num_heard, "heard"),
        _one("preble_peer_bytes_total", group.told_bytes),
        *(_one("preble_peer_bad_packets_total", count, why) for why, count in group.num_bad.items()),
        _one("preble_peer_unknown_prompts_total", group.num_unknown),
    ]


def of_build(policy: str) -> Iterable[Reading]:
    """Return what runs here."""
    core = "plain" if (scheduler_module.__file__ or "").endswith(".py") else "compiled"
    return [_one("preble_build_info", 1, __version__, commit(), policy, platform.python_version(), core)]


def of_process(name: str) -> Iterator[Reading]:
    """Yield the CPU time and memory of this process. `name`: what it does in the gateway."""
    yield _one("preble_process_cpu_seconds_total", time.process_time(), name)
    statm = Path("/proc/self/statm")
    if statm.exists():
        yield _one("preble_process_resident_bytes", int(statm.read_text().split()[1]) * mmap.PAGESIZE, name)


def _one(name: str, value: float, *labels: str) -> Reading:
    return name, labels, [float(value)]
