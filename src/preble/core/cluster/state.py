"""What the global scheduler knows of the cluster, as one value that its parts share."""

from __future__ import annotations

from preble.core.cluster.load_window import LoadWindow
from preble.core.cluster.recomputation import Recomputation
from preble.core.cluster.replicas import ReplicaTable
from preble.core.cluster.speeds import ReplicaSpeeds
from preble.core.cluster.tiers import Tiers
from preble.core.costs.model import CostModel
from preble.core.prefixes.eviction_cost import EvictionCost
from preble.core.prefixes.index import PrefixIndex
from preble.core.prefixes.radix_tree import Match, Node
from preble.core.replica_index import ReplicaIndex
from preble.core.types import ReplicaSpec, Request, Tier


class ClusterState:
    """The replicas, what each caches, and the load in the window.

    `replicas`: the table, with counts of what is in flight. `index`: the prefix trees and each replica's cache entries.
    `window`: work placed lately. `speeds`: how much slower a replica is than the others. `eviction_costs`: M of each
    replica. `tiers`: their other places.
    """

    def __init__(self, cost_model: CostModel, window_s: float) -> None:
        self.cost_model = cost_model
        self.replicas = ReplicaTable()
        self.index = PrefixIndex()
        self.window = LoadWindow(cost_model, window_s)
        self.recomputation = Recomputation()
        self.speeds = ReplicaSpeeds()
        self.eviction_costs: dict[ReplicaIndex, EvictionCost] = {}
        self.tiers = Tiers()

    def add_replica(self, spec: ReplicaSpec) -> ReplicaIndex:
        """Add a replica with an empty cache; returns its index."""
        replica = self.replicas.add(spec)
        self.index.add_replica(replica, spec.kv_capacity_tokens)
        self.window.add_replica(replica)
        self.speeds.add_replica(replica)
        self.eviction_costs[replica] = EvictionCost(self.index.caches[replica], self.cost_model)
        if spec.store:
            self.place_of(replica, Tier.STORE)
        return replica

    def place_of(self, replica: ReplicaIndex, tier: Tier) -> ReplicaIndex:
        """Where the replica keeps blocks in this tier: an index of its own, or of its store."""
        place = self.tiers.of(replica).get(tier)
        if place is None:
            store = self.replicas.specs[replica].store if tier is Tier.STORE else ""
            place = self.tiers.store(store) if store else None
            if place is None:
                place = self._add_place()
                if store:
                    self.tiers.add_store(store, place)
            self.tiers.add(replica, tier, place)
        return place

    def _add_place(self) -> ReplicaIndex:
        place = self.replicas.reserve()
        for table in (self.index, self.window, self.speeds):
            table.add_replica(place)
        return place

    def remove_replica(self, replica: ReplicaIndex) -> None:
        """Forget a replica on which nothing is in flight any more. O(its cache entries + requests in the window)."""
        self.window.remove_replica(replica)
        self.speeds.remove_replica(replica)
        self.index.remove_replica(replica)
        for place in self.tiers.remove_replica(replica):
            self.index.remove_replica(place)
            self.replicas.give_back(place)
        self.replicas.remove(self.replicas.replica_id(replica))
        del self.eviction_costs[replica]

    def use(self, cost_model: CostModel) -> None:
        """Compute costs with another model from now on; see docs/decisions/0006. O(replicas)."""
        self.cost_model = cost_model
        self.window.use(cost_model)
        for replica in self.replicas.specs:
            self.eviction_costs[replica] = EvictionCost(self.index.caches[replica], cost_model)

    def expected_output_tokens(self, prefix: tuple[Node, ...]) -> float:
        """Output tokens to expect of a request that begins with these nodes, from the top. O(depth).

        The mean of the longest prefix that has been answered, and the less it has been, the more that of shorter ones.
        """
        expected = self.window.mean_answer_tokens
        for node in prefix:
            if node.history is not None:
                expected = node.history.expected_tokens(expected)
        return expected

    def match(self, request: Request, model: str) -> Match:
        """Where the request's prompt leads in the tree of its model and namespace."""
        return self.index.match(request.prompt, scoped_namespace(model, request.namespace))

    def expire(self, now: float) -> None:
        """Move the load window to `now`, and the speeds with it."""
        for replica, leaf in self.window.expire(now):
            self.index.forget_use(replica, leaf)
        self.speeds.update(now)


def scoped_namespace(model: str, namespace: str) -> str:
    """Return the namespace inside a base model: two models share no KV, whatever the client or the engine gives."""
    return f"{model}\x1e{namespace}" if model else namespace
