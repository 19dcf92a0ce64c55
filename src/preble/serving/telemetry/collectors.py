"""The state of the scheduler and the engines' load as metrics, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.placing.snapshot import SchedulerState
from preble.core.types import ReplicaId
from preble.serving.replicas.live import LiveReplica
from preble.serving.replicas.rows import MemberRow, SourceRow

_LABELS = ("replica",)
_ENGINE_LOAD = MappingProxyType(
    {
        "running": "Requests that the engine reports as running, with other clients' requests.",
        "waiting": "Requests that the engine reports as waiting, with other clients' requests.",
        "kv_tokens": "Tokens of KV cache that the engine reports as in use.",
    }
)


class LogCounts(Protocol):
    """The counters of a decision log."""

    @property
    def num_written(self) -> int: ...

    @property
    def num_dropped(self) -> int: ...


class SchedulerCollector(Collector):
    """The state of one scheduler. `log`: the decision log, None where none is kept."""

    def __init__(self, scheduler: GlobalScheduler, log: LogCounts | None = None) -> None:
        self._scheduler = scheduler
        self._log = log

    def describe(self) -> Iterator[Metric]:
        """Return nothing, so that registering does not read the scheduler."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        state = self._scheduler.snapshot()
        yield from _of_index(state)
        yield _of_costs(state)
        yield from _of_replicas(state)
        if self._log is not None:
            yield _counter("decision_log_lines", "Lines in the decision log.", self._log.num_written)
            yield _counter("decision_log_dropped", "Lines missing from the decision log.", self._log.num_dropped)


def _of_index(state: SchedulerState) -> Iterator[Metric]:
    yield _gauge("index_bytes", "Memory of the prefix index.", state.num_index_bytes)
    yield _gauge("index_tokens", "Tokens in the prefix index.", state.num_index_tokens)
    yield _counter("unindexed", "Prompts and blocks that found no room in the index.", state.num_unindexed)
    yield _gauge(
        "replicated_prefixes",
        "Prefixes that rebalancing serves from replicas of its choice.",
        state.num_replicated_prefixes,
    )


def _of_costs(state: SchedulerState) -> Metric:
    factors = state.cost_factors
    family = GaugeMetricFamily(
        "preble_cost_factor", "What live requests have corrected the cost profile's times by.", labels=("work",)
    )
    family.add_metric(["prefill"], factors.prefill)
    family.add_metric(["decode"], factors.decode)
    return family


def _of_replicas(state: SchedulerState) -> Iterator[Metric]:
    load = GaugeMetricFamily(
        "preble_load_seconds", "L: seconds of work placed on a replica in the window.", labels=_LABELS
    )
    waiting = GaugeMetricFamily(
        "preble_waiting_prefill_tokens", "Prompt tokens to compute, of requests without a token.", labels=_LABELS
    )
    held = GaugeMetricFamily("preble_believed_cached_tokens", "KV tokens believed to be held.", labels=_LABELS)
    predicted = CounterMetricFamily(
        "preble_drift_predicted_tokens",
        "Prompt tokens believed cached, where it reported.",
        labels=_LABELS,
    )
    reported = CounterMetricFamily(
        "preble_drift_reported_tokens", "Prompt tokens that it then reported as cached.", labels=_LABELS
    )
    trusted = GaugeMetricFamily(
        "preble_replica_trusted", "1 while what a replica is believed to hold counts.", labels=_LABELS
    )
    for replica_id, replica in state.replicas.items():
        load.add_metric([replica_id], replica.load_s)
        waiting.add_metric([replica_id], replica.waiting_prefill_tokens)
        held.add_metric([replica_id], replica.cached_tokens)
        predicted.add_metric([replica_id], replica.drift.predicted_tokens)
        reported.add_metric([replica_id], replica.drift.reported_tokens)
        trusted.add_metric([replica_id], replica.trusted)
    yield from (load, waiting, held, predicted, reported, trusted)


class EngineLoadCollector(Collector):
    """The load that engines report, for the replicas whose load is known at the scrape."""

    def __init__(self, replicas: Mapping[ReplicaId, LiveReplica]) -> None:
        self._replicas = replicas

    def describe(self) -> Iterator[Metric]:
        """Return nothing, so that registering does not read the replicas."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        known = {name: replica.engine_load for name, replica in self._replicas.items() if replica.engine_load}
        for field, text in _ENGINE_LOAD.items():
            family = GaugeMetricFamily(f"preble_engine_{field}", text, labels=_LABELS)
            for replica_id, load in known.items():
                family.add_metric([replica_id], getattr(load, field))
            yield family


class MemberRows(Protocol):
    """The replicas that are watched, and who names them."""

    def __iter__(self) -> Iterator[MemberRow]: ...

    def sources(self) -> list[SourceRow]: ...


class MembersCollector(Collector):
    """Every replica that is watched with its state, also those that were never up; and the sources that name them."""

    def __init__(self, members: MemberRows) -> None:
        self._members = members

    def describe(self) -> Iterator[Metric]:
        """Return nothing, so that registering does not read the members."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "preble_replica_state",
            "1 for the state of each watched replica: joining, live, down, draining or drained.",
            labels=("replica", "state"),
        )
        removable = GaugeMetricFamily(
            "preble_replica_safe_to_remove", "1 for a replica that is drained and runs nothing.", labels=_LABELS
        )
        for row in self._members:
            state.add_metric([row.url, row.state], 1)
            removable.add_metric([row.url], row.safe_to_remove)
        named = GaugeMetricFamily("preble_source_replicas", "Replicas that a source names.", labels=("source",))
        current = GaugeMetricFamily(
            "preble_source_current", "1 while what a source names is known to be current.", labels=("source",)
        )
        for source in self._members.sources():
            named.add_metric([source.name], source.replicas)
            current.add_metric([source.name], source.error is None)
        yield from (state, removable, named, current)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"preble_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"preble_{name}", text, value=value)
