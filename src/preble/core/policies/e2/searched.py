"""What `Rebalancer.search` asks of a real cluster."""

from __future__ import annotations

from preble.core.cluster.state import ClusterState
from preble.core.prefixes.radix_tree import Node
from preble.core.replica_index import ReplicaIndex, replicas_in


class SearchedCluster:
    """See `rebalance.Cluster`. Only trusted replicas count: on others no match would."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster

    @property
    def eligible_replicas(self) -> list[ReplicaIndex]:
        return replicas_in(self._cluster.replicas.trusted)

    @property
    def load_s(self) -> list[float]:
        return self._cluster.window.load_s

    def recompute_s(self, node: Node) -> float:
        return self._cluster.cost_model.prefill_s(node.end)

    def holders(self, node: Node) -> list[ReplicaIndex]:
        return replicas_in(node.full_holders & self._cluster.replicas.trusted)

    def window_requests(self, node: Node) -> int:
        caches = self._cluster.index.caches
        entries = (caches[replica].get(node) for replica in replicas_in(node.holders))
        return sum(entry.recent_uses for entry in entries if entry is not None)

    def load_below(self, node: Node) -> dict[Node, float]:
        return self._cluster.window.load_below(node)
