"""E2: exploit a cached prefix or explore a replica (Algorithm 1), by load cost L + M + P (Algorithm 2).

Source: Preble, "E2 Global Scheduler". Where the paper is silent: docs/decisions/0001 and 0004.
"""

from __future__ import annotations

from random import Random
from typing import Final

from preble.core.cluster.state import ClusterState
from preble.core.policies.cost_table import load_costs
from preble.core.policies.e2.key_portion import KeyPortion
from preble.core.policies.e2.rebalance import Rebalancer, RebalanceSettings
from preble.core.policies.policy import Watching
from preble.core.policies.view import Choice, ClusterView
from preble.core.prefixes.radix_tree import Node
from preble.core.replica_index import ReplicaIndex, ReplicaSet, replicas_in
from preble.core.types import PrefixReplication, Reason, ReplicaId, RequestId
from preble.core.types.events import ReplicaAdded, ReplicaRemoved, Reported, SchedulerEvent
from preble.core.types.life import FirstToken, Moved, TransferFailed, Transferred


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
        entries = (caches[replica].entries.get(node) for replica in replicas_in(node.holders))
        return sum(entry.recent_uses for entry in entries if entry is not None)

    def load_below(self, node: Node) -> dict[Node, float]:
        return self._cluster.window.load_below(node)


_STANDS_OUT: Final = 1.5
"""How much more decoding per prefill a replica must have than the others together: Th_bal, the paper's measure."""


class _Asked:
    """A request that has no first token yet, and was placed because of a prefix: it ends in `node`.

    `prefill_s`: of the prompt where it was placed. `eligible`: the replicas that could have got it.
    """

    __slots__ = ("eligible", "node", "placed_at", "prefill_s", "replica")

    def __init__(
        self, node: Node, replica: ReplicaIndex, placed_at: float, prefill_s: float, eligible: ReplicaSet
    ) -> None:
        self.node = node
        self.replica = replica
        self.placed_at = placed_at
        self.prefill_s = prefill_s
        self.eligible = eligible


class E2(Watching):
    """The paper's policy. It keeps books of how long the requests of each prefix queue: see `Watching`.

    `rebalance`: redirect requests off heavy replicas, and serve replicated prefixes where they were replicated.
    `mix_decode`: send what must be explored to a replica that mostly decodes. `max_decode_ratio`: ImbalR, the share of
    decoding in a replica's load above which it counts as such; calculated from the cost profile if None. `settings`:
    when load moves.
    """

    def __init__(
        self,
        name: str = "e2",
        *,
        rebalance: bool = True,
        mix_decode: bool = True,
        max_decode_ratio: float | None = None,
        settings: RebalanceSettings | None = None,
    ) -> None:
        self.name = name
        self._rebalance = rebalance
        self._mix_decode = mix_decode
        self._max_decode_ratio = max_decode_ratio
        self._rebalancer = Rebalancer(settings or RebalanceSettings())
        self._cluster: ClusterState | None = None
        self._indexes: dict[ReplicaId, ReplicaIndex] = {}
        self._asked: dict[RequestId, _Asked] = {}

    def use(self, name: str, settings: RebalanceSettings) -> None:
        """Move load by these settings, under this name, which tells them. To be called before `watch`."""
        self.name = name
        self._rebalancer = Rebalancer(settings)

    # -- choosing -----------------------------------------------------------------------------------------------------

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """Exploit if less of the prompt is missing than cached somewhere, else explore every replica.

        O(depth + holders of the key portion + victims) to exploit, O(replicas) to explore.
        """
        key = KeyPortion(view)
        if view.request.num_prompt_tokens - key.cached_tokens < key.cached_tokens:
            return self._exploit(view, key, rng)
        return self._explore(view, rng)

    def _exploit(self, view: ClusterView, key: KeyPortion, rng: Random) -> Choice:
        holders = key.holders
        if not self._rebalance:
            costs = load_costs(view, holders)
            return Choice(costs.cheapest(rng), Reason.EXPLOIT, costs)
        prefix_tokens, replicas = key.prefix_tokens, holders
        if (replicated := self._replicated_on(view)) is not None:
            prefix_tokens, replicas = replicated
        costs = load_costs(view, replicas)
        choice = Choice(costs.cheapest(rng), Reason.EXPLOIT, costs)
        if self._sheds(view, choice.replica) and (redirected := self._redirect(view, choice.replica, rng)) is not None:
            choice, prefix_tokens = redirected, key.prefix_tokens
        elif choice.replica not in holders:
            choice.reason = Reason.REPLICATE
        self._note(view, choice.replica, prefix_tokens)
        return choice

    def _replicated_on(self, view: ClusterView) -> tuple[int, list[ReplicaIndex]] | None:
        """Return the tokens of the replicated prefix that the prompt begins with, and the replicas that serve it.

        None if no such prefix is replicated.
        """
        found = self._rebalancer.replicas_of(view.match.path)
        if found is None:
            return None
        node, replicas = found
        allowed = [replica for replica in replicas if view.trusted >> replica & 1]
        return (node.end, allowed) if allowed else None

    def _sheds(self, view: ClusterView, replica: ReplicaIndex) -> bool:
        """Return True if the replica is too loaded, compared with the lightest, to be exploited. O(replicas)."""
        return self._rebalancer.sheds(replica, view.load_s[replica], view.lightest_load_s())

    def _redirect(self, view: ClusterView, heavy: ReplicaIndex, rng: Random) -> Choice | None:
        """Return the lightest replica in place of a heavy one, if that saves more waiting than it costs to compute;
        else None.

        It costs the prefix, which the lightest must compute; it saves the difference of what waits on the two, less
        that. Without this test, half-empty replicas would trade prefixes for nothing (docs/decisions/0004).
        """
        lightest_s = view.lightest_load_s()
        lightest = rng.choice([replica for replica in view.replicas if view.load_s[replica] == lightest_s])
        costs = load_costs(view, [heavy, lightest])
        there, here = costs[1], costs[0]
        price_s = there.eviction_s + there.prefill_s - here.eviction_s - here.prefill_s
        saved_s = view.waiting_prefill_s[heavy] - view.waiting_prefill_s[lightest] - price_s
        return Choice(lightest, Reason.REDIRECT, costs) if saved_s > price_s else None

    def _explore(self, view: ClusterView, rng: Random) -> Choice:
        if self._mix_decode:
            decoding = self._mostly_decoding(view)
            if decoding is not None:
                return Choice(decoding, Reason.BALANCE, load_costs(view, [decoding]))
        costs = load_costs(view, view.replicas)
        return Choice(costs.cheapest(rng), Reason.EXPLORE, costs)

    def _mostly_decoding(self, view: ClusterView) -> ReplicaIndex | None:
        """Return the replica with the highest share of decoding, if that is over ImbalR and the others' shares are
        lower.

        Where all replicas have relatively balanced shares, the paper compares costs. "Relatively" is by Th_bal here:
        decoding per prefill on the replica, compared with decoding per prefill on the others together.
        """
        replica = max(view.replicas, key=view.decode_ratio)
        ratio, limit = view.decode_ratio(replica), self._max_decode_ratio
        if ratio <= (view.cost_model.balanced_decode_ratio() if limit is None else limit) or self._sheds(view, replica):
            return None
        decode_s, load_s = view.decode_load_s, view.load_s
        others_decode_s = sum([decode_s[one] for one in view.replicas]) - decode_s[replica]
        others_prefill_s = sum([load_s[one] for one in view.replicas]) - load_s[replica] - others_decode_s
        stands_out = decode_s[replica] * others_prefill_s > _STANDS_OUT * others_decode_s * (
            load_s[replica] - decode_s[replica]
        )
        return replica if stands_out else None

    # -- its books ----------------------------------------------------------------------------------------------------

    @property
    def num_replicated(self) -> int:
        """Prefixes that are served by replicas of its choice."""
        return self._rebalancer.num_replicated

    def watch(self, cluster: ClusterState) -> None:
        """See `Watching`."""
        self._cluster = cluster
        self._rebalancer.begin(cluster.window.window_s)

    def _note(self, view: ClusterView, replica: ReplicaIndex, prefix_tokens: int) -> None:
        """The request goes to `replica` because of the prefix of this length: watch how long it queues."""
        node = view.match.node_at(prefix_tokens) if prefix_tokens else None
        if node is not None:
            asked = _Asked(node, replica, view.now, view.own_prefill_s(replica), view.eligible)
            self._asked[view.request.request_id] = asked

    def on(self, event: SchedulerEvent, now: float) -> None:
        """See `Watching`."""
        if isinstance(event, Reported):
            if isinstance(event.fact, Transferred | TransferFailed):
                return
            asked = self._asked.pop(event.request_id, None)
            if asked is None or isinstance(event.fact, Moved):
                return
            if isinstance(event.fact, FirstToken):
                queueing_s = now - asked.placed_at - asked.prefill_s
                self._rebalancer.note_queueing(asked.node, queueing_s, now, asked.eligible)
            elif event.fact.output_tokens:
                # Of an answer that is not streamed only the end is seen, and it says nothing of queueing.
                self._rebalancer.note_queueing(asked.node, None, now, asked.eligible)
        elif isinstance(event, ReplicaAdded):
            assert self._cluster is not None
            self._indexes[event.spec.replica_id] = self._cluster.replicas.replica(event.spec.replica_id)
        elif isinstance(event, ReplicaRemoved):
            replica = self._indexes.pop(event.replica_id)
            self._asked = {name: asked for name, asked in self._asked.items() if asked.replica != replica}
            self._rebalancer.remove_replica(replica)

    def next_timer(self) -> float | None:
        """Return when the next search for prefixes to replicate or retire is due."""
        return self._rebalancer.next_search()

    def on_timer(self, now: float) -> list[PrefixReplication]:
        """Search if it is due."""
        search_at, cluster = self._rebalancer.next_search(), self._cluster
        if cluster is None or search_at is None or search_at > now:
            return []
        ids = cluster.replicas
        return [
            PrefixReplication(ids.replica_id(change.replica), change.node.end, change.added, change.num_replicas)
            for change in self._rebalancer.search(SearchedCluster(cluster), now)
        ]
