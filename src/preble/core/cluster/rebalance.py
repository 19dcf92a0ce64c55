"""After placement: shift load off heavy replicas, and replicate a prefix that is too hot for one.

Three mechanisms, from fast to slow (Preble, "Post-assignment load adjustment"; ours is told in docs/decisions/0004):

- *redirect*, on the request path, O(1): a request that would exploit a replica which is Th_bal times as loaded as the
  lightest goes to the lightest instead, if the gap is worth computing the prefix again;
- *replicate*, in the background: when the mean queueing time of a prefix's requests doubles all the same, the prefix
  gets a further home, and what lies below it in the tree is split between the homes by load;
- *retire*, in the background: when its load has fallen, a prefix loses its latest home again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from preble.core.prefixes.radix_tree import Node
from preble.core.replica_index import ReplicaIndex

_FORGET_PARTS = 8
"""Searches in which every prefix is looked at once, whether anybody still asks for it."""


@dataclass(frozen=True, slots=True)
class RebalanceSettings:
    """When load moves.

    `threshold`: Th_bal, the ratio of loads at which shedding starts (the published code's 1.5). `calm`: the ratio at
    which it stops; lower, so that it does not flutter. `queue_growth`: by which factor queueing must grow from one half
    of the window to the next for a prefix to be replicated (the paper's "doubles"). `min_requests`: in each half, for
    its mean to count. `retire_below`: a home is given up when the others would each get less than this part of the
    request rate at which the prefix was replicated. `interval_s`: between searches for what to replicate or retire.
    `replicate`: whether prefixes are replicated at all.
    """

    threshold: float = 1.5
    calm: float = 1.25
    queue_growth: float = 2.0
    min_requests: int = 8
    retire_below: float = 0.5
    interval_s: float = 5.0
    replicate: bool = True

    def __post_init__(self) -> None:
        if not 1.0 <= self.calm <= self.threshold:
            raise ValueError(f"need 1 <= calm <= threshold, got calm {self.calm}, threshold {self.threshold}")


@dataclass(slots=True)
class _Half:
    """Requests of one prefix that got their first token in one half of the window.

    `num_timed`: those of them whose queueing counts; `queueing_s`: what they queued, together.
    """

    started_at: float
    num_requests: int = 0
    num_timed: int = 0
    queueing_s: float = 0.0

    @property
    def mean_queueing_s(self) -> float:
        return self.queueing_s / self.num_timed if self.num_timed else 0.0


@dataclass(slots=True)
class _Prefix:
    """What is known of a prefix. `homes`: slots that serve it, first the oldest; empty while nothing was decided.
    `rate_per_home`: requests a second and home when it was last replicated. `shares`: which home has which child.
    `changed_at`: when load was last taken off one of its homes; how long earlier requests queue says nothing any more.
    """

    now: _Half
    before: _Half
    homes: list[ReplicaIndex] = field(default_factory=list)
    rate_per_home: float = 0.0
    shares: dict[Node, ReplicaIndex] = field(default_factory=dict)
    changed_at: float = float("-inf")

    def retire(self) -> ReplicaIndex:
        """Give up the latest home; returns it."""
        replica = self.homes[-1]
        self.leave(replica)
        return replica

    def leave(self, replica: ReplicaIndex) -> None:
        self.homes.remove(replica)
        self.shares = {child: home for child, home in self.shares.items() if home != replica}


@dataclass(frozen=True, slots=True)
class HomeChange:
    """The prefix that ends in `node` got the replica in `replica` as a home, or lost it; it has `num_homes` now."""

    node: Node
    replica: ReplicaIndex
    added: bool
    num_homes: int


class Cluster(Protocol):
    """What the search may ask. `load_s`: L by slot."""

    @property
    def eligible_replicas(self) -> Sequence[ReplicaIndex]: ...

    @property
    def load_s(self) -> Sequence[float]: ...

    def recompute_s(self, node: Node) -> float:
        """Seconds to compute the prompt up to the end of `node` from nothing."""
        ...

    def holders(self, node: Node) -> list[ReplicaIndex]:
        """Slots of the replicas that hold all of `node`, ascending."""
        ...

    def window_requests(self, node: Node) -> int:
        """Requests of the window, on all replicas, that use `node`."""
        ...


class Rebalancer:
    """Which replicas shed load, and which prefixes have which homes.

    `num_replicated`: prefixes with more homes than one, or with one that must outlast the holdings of a retired home.
    """

    def __init__(self, settings: RebalanceSettings, window_s: float) -> None:
        self.settings = settings
        self._half_s = window_s / 2
        self._prefixes: dict[Node, _Prefix] = {}
        self._queued: dict[Node, _Prefix] = {}
        self._unchecked: list[Node] = []
        self._shedding = 0
        self.num_replicated = 0
        self._next_search: float | None = None

    # -- on the request path ------------------------------------------------------------------------------------------

    def sheds(self, replica: ReplicaIndex, load_s: float, lightest_s: float) -> bool:
        """True if the replica is too loaded, compared with the lightest, to be exploited. O(1); with hysteresis."""
        bit = 1 << replica
        limit = self.settings.calm if self._shedding & bit else self.settings.threshold
        if load_s > limit * lightest_s:
            self._shedding |= bit
        else:
            self._shedding &= ~bit
        return bool(self._shedding & bit)

    def homes(self, path: Sequence[Node]) -> tuple[Node, list[ReplicaIndex]] | None:
        """The deepest prefix on the path that has homes, with those that may get the request; None if there is none."""
        if not self.num_replicated:
            return None
        below: Node | None = None
        for node in reversed(path):
            prefix = self._prefixes.get(node)
            if prefix is not None and prefix.homes:
                share = prefix.shares.get(below) if below is not None else None
                return node, [share] if share is not None else prefix.homes
            below = node
        return None

    def note_first_token(self, node: Node, queueing_s: float, now: float) -> None:
        """A request of the prefix that ends in `node` waited so long before its prompt was computed."""
        if not self.settings.replicate:
            return
        prefix = self._prefixes.get(node)
        if prefix is None:
            prefix = self._prefixes[node] = _Prefix(_Half(now), _Half(now - self._half_s))
        self._turn(prefix, now)
        prefix.now.num_requests += 1
        if now - queueing_s >= prefix.changed_at:
            prefix.now.num_timed += 1
            if queueing_s > 0.0:
                prefix.now.queueing_s += queueing_s
                self._queued[node] = prefix
        if self._next_search is None:
            self._next_search = now + self.settings.interval_s

    # -- in the background --------------------------------------------------------------------------------------------

    def next_search(self) -> float | None:
        """When `search` is due; None while there is nothing to watch."""
        return self._next_search

    def search(self, cluster: Cluster, now: float) -> list[HomeChange]:
        """Replicate what queues too long, retire what has cooled, forget what nobody asks for.

        What has queued longest in all comes first, and a replica is changed once a search: all that it serves queues
        while it is overloaded, and one prefix less may be enough. O(prefixes that queued since the last search).
        """
        self._forget_unasked(now)
        queued, self._queued = self._queued, {}
        hot = {n: p for n, p in queued.items() if n in self._prefixes and self._queues_too_long(n, p, cluster, now)}
        by_load = (
            sorted(cluster.eligible_replicas, key=lambda replica: (cluster.load_s[replica], replica)) if hot else []
        )
        changes: list[HomeChange] = []
        changed: set[ReplicaIndex] = set()
        for node, prefix in sorted(hot.items(), key=lambda item: -item[1].now.queueing_s):
            homes = prefix.homes or cluster.holders(node)
            lightest = None if changed.intersection(homes) else _lighter_home(homes, by_load, cluster)
            if lightest is not None and lightest not in changed:
                changes.append(self._replicate(node, prefix, [*homes, lightest], cluster, now))
                changed.update(prefix.homes)
        for node, prefix in self._prefixes.items():
            if len(prefix.homes) > 1 and node not in hot and self._has_cooled(prefix, now):
                changes.append(HomeChange(node, prefix.retire(), added=False, num_homes=len(prefix.homes)))
        self._start_timing_anew(changed, cluster, now)
        self.num_replicated = sum(bool(prefix.homes) for prefix in self._prefixes.values())
        self._next_search = now + self.settings.interval_s if self._prefixes else None
        return changes

    def remove_replica(self, replica: ReplicaIndex) -> None:
        """The replica is gone: it sheds nothing and is nobody's home."""
        self._shedding &= ~(1 << replica)
        for prefix in self._prefixes.values():
            if replica in prefix.homes:
                prefix.leave(replica)
        self.num_replicated = sum(bool(prefix.homes) for prefix in self._prefixes.values())

    # -- inside -------------------------------------------------------------------------------------------------------

    def _turn(self, prefix: _Prefix, now: float) -> None:
        """Let the current half become the previous one when it is over."""
        halves = int((now - prefix.now.started_at) / self._half_s)
        if halves:
            start = prefix.now.started_at + halves * self._half_s
            prefix.before = prefix.now if halves == 1 else _Half(start - self._half_s)
            prefix.now = _Half(start)

    def _queues_too_long(self, node: Node, prefix: _Prefix, cluster: Cluster, now: float) -> bool:
        """Queueing has doubled, over enough requests to tell, and costs more than computing the prefix elsewhere."""
        self._turn(prefix, now)
        enough = self.settings.min_requests
        if prefix.now.num_timed < enough or not prefix.now.queueing_s:
            return False
        before_s = prefix.before.mean_queueing_s if prefix.before.num_timed >= enough else 0.0
        queueing_s = prefix.now.mean_queueing_s
        return queueing_s >= self.settings.queue_growth * before_s and queueing_s > cluster.recompute_s(node)

    def _replicate(
        self, node: Node, prefix: _Prefix, homes: list[ReplicaIndex], cluster: Cluster, now: float
    ) -> HomeChange:
        """Let the prefix have these homes, the last of which is new."""
        prefix.rate_per_home = self._rate(prefix, now) / (len(homes) - 1)
        prefix.homes = homes
        prefix.shares = _split_by_load(node, homes, cluster)
        prefix.before, prefix.now = prefix.now, _Half(now)
        return HomeChange(node, homes[-1], added=True, num_homes=len(homes))

    def _forget_unasked(self, now: float) -> None:
        """Drop prefixes that nobody asked for in either half, or that are in the tree no more; some at a time."""
        if not self._unchecked:
            self._unchecked = list(self._prefixes)
        for _ in range(min(len(self._prefixes) // _FORGET_PARTS + 1, len(self._unchecked))):
            node = self._unchecked.pop()
            prefix = self._prefixes[node]
            self._turn(prefix, now)
            if not node.tokens or not (prefix.now.num_requests or prefix.before.num_requests):
                del self._prefixes[node]

    def _start_timing_anew(self, replicas: set[ReplicaIndex], cluster: Cluster, now: float) -> None:
        """Load was moved between these replicas: what has queued there until now says nothing of what will."""
        if not replicas:
            return
        for node, prefix in self._prefixes.items():
            if not replicas.isdisjoint(prefix.homes or cluster.holders(node)):
                prefix.changed_at = now
                prefix.now.num_timed, prefix.now.queueing_s = 0, 0.0

    def _has_cooled(self, prefix: _Prefix, now: float) -> bool:
        self._turn(prefix, now)
        rate_per_home = self._rate(prefix, now) / (len(prefix.homes) - 1)
        return rate_per_home < self.settings.retire_below * prefix.rate_per_home

    def _rate(self, prefix: _Prefix, now: float) -> float:
        """Requests a second over the current half and the one before."""
        seconds = now - prefix.before.started_at
        return (prefix.now.num_requests + prefix.before.num_requests) / seconds if seconds > 0 else 0.0


def _lighter_home(
    homes: Sequence[ReplicaIndex], by_load: Sequence[ReplicaIndex], cluster: Cluster
) -> ReplicaIndex | None:
    """The lightest replica that is no home, if it is lighter than every one of the homes. `by_load`: lightest first."""
    lightest = next((replica for replica in by_load if replica not in homes), None)
    if lightest is None or not homes:
        return None
    return lightest if cluster.load_s[lightest] < min(cluster.load_s[replica] for replica in homes) else None


def _split_by_load(node: Node, homes: list[ReplicaIndex], cluster: Cluster) -> dict[Node, ReplicaIndex]:
    """Give each shared subtree below `node` to one of the homes, the heaviest first to the home with the least so far.

    On equal terms a subtree stays with a home that holds it already, and the older one comes first: which tokens it has
    decides nothing, so that logs with renamed tokens replay. Load: requests in the window.
    """
    given = dict.fromkeys(homes, 0)
    shares: dict[Node, ReplicaIndex] = {}
    children = [(cluster.window_requests(child), child) for child in (node.children or {}).values()]
    for requests, child in sorted(children, key=lambda item: -item[0]):
        if requests < 2:
            break
        holders = cluster.holders(child)
        home = min(homes, key=lambda replica: (given[replica], replica not in holders, replica))
        shares[child] = home
        given[home] += requests
    return shares
