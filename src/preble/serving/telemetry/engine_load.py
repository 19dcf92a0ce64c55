"""What engines say of their own load as metrics, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from preble.core.types import ReplicaId
from preble.serving.dispatcher import LiveReplica

_GAUGES = MappingProxyType(
    {
        "running": "Requests running on a replica by its own account, other clients' among them.",
        "waiting": "Requests waiting on a replica by its own account, other clients' among them.",
        "kv_tokens": "Tokens of KV cache in use on a replica by its own account.",
    }
)


class EngineLoadCollector(Collector):
    """`preble_engine_*` of those of these replicas whose load is known now. `live`: looked at anew each time."""

    def __init__(self, live: Mapping[ReplicaId, LiveReplica]) -> None:
        self._live = live

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are looked at when collected."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        known = {name: replica.engine_load for name, replica in self._live.items() if replica.engine_load is not None}
        for field, text in _GAUGES.items():
            family = GaugeMetricFamily(f"preble_engine_{field}", text, labels=("replica",))
            for replica_id, load in known.items():
                family.add_metric([replica_id], getattr(load, field))
            yield family
