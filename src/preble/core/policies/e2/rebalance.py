"""Move load off heavy replicas, and replicate a prefix that is too popular for one, after placement.

Three mechanisms, from fast to slow (Preble, "Post-assignment load adjustment"; ours: docs/decisions/0004):

- *redirect*, on the request path, O(1): a request would exploit a replica that is Th_bal times as loaded as the
  lightest. It goes to the lightest instead, if that saves more waiting than computing the prefix again costs.
- *replicate*, in the background: the mean queueing time of a prefix's requests doubles all the same. The prefix gets a
  further replica, and the subtrees below it are divided between its replicas by load.
- *retire*, in the background: the prefix's load has fallen. It loses its latest replica again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final, Protocol

from preble.core.prefixes.radix_tree import Node
from preble.core.replica_index import ReplicaIndex, ReplicaSet
from preble.errors import ConfigError

_SETTINGS: Final = (
    "threshold",
    "calm",
    "queue_growth",
    "min_requests",
    "retire_below",
    "interval_s",
    "replicate",
)
_FORGET_PARTS = 8
"""Number of searches in which each prefix is checked once: is it still in use?"""


@dataclass(frozen=True, slots=True)
class RebalanceSettings:
    """When load moves.

    `threshold`: Th_bal, the ratio of loads at which shedding starts (the published code's 1.5). `calm`: the ratio at
    which it stops; a lower one, so that a replica does not start and stop all the time. `queue_growth`: the factor by
    which queueing must grow from one half of the window to the next before a prefix is replicated (the paper's
    "doubles"). `min_requests`: the fewest requests in a half for its mean to count. `retire_below`: a prefix loses a
    replica when each of the others would get less than this part of the request rate at which it was replicated.
    `interval_s`: time between searches for prefixes to replicate or retire. `replicate`: False for never.
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
        if self.queue_growth < 1 or self.min_requests < 1 or self.interval_s <= 0:
            raise ValueError("need queue_growth and min_requests of 1 or more, and an interval_s above 0")


def settings_of(text: str) -> RebalanceSettings:
    """Read settings as in `threshold=2&replicate=false`. Raises: ConfigError: there is none of that name; it is wrong.

    >>> settings_of("min_requests=4&replicate=false").replicate
    False
    """
    known, given = RebalanceSettings(), dict[str, Any]()
    for part in text.split("&"):
        name, _, value = part.partition("=")
        if name not in _SETTINGS:
            raise ConfigError(f"e2 has no setting {name!r}; it has: {', '.join(_SETTINGS)}")
        try:
            given[name] = _read(value, getattr(known, name))
        except ValueError as error:
            raise ConfigError(f"e2 cannot use {part!r}: give a value such as {getattr(known, name)}") from error
    try:
        return replace(known, **given)
    except ValueError as error:
        raise ConfigError(f"e2: {error}") from error


def _read(text: str, default: Any) -> Any:
    """Raises: ValueError."""
    if isinstance(default, bool):
        return ("false", "true").index(text.lower()) == 1
    number = type(default)(text)
    if not 0 <= number < inf:
        raise ValueError(text)
    return number


class _Half:
    """Requests of one prefix that got their first token in one half of the window.

    `num_timed`: those of them whose queueing counts; `queueing_s`: the sum of their queueing times.
    """

    __slots__ = ("num_requests", "num_timed", "queueing_s", "started_at")

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.num_requests = 0
        self.num_timed = 0
        self.queueing_s = 0.0

    @property
    def mean_queueing_s(self) -> float:
        return self.queueing_s / self.num_timed if self.num_timed else 0.0


class _Prefix:
    """What is known of a prefix.

    `replicas`: those that serve it, the oldest first; empty until it is replicated. `eligible`: the replicas that its
    latest request could have got, which are those of its model. `rate_per_replica`: requests a
    second on each when it was last replicated. `child_replica`: the replica that serves each subtree below it.
    `changed_at`: when load was last moved off one of its replicas; queueing times from before then no longer count.
    """

    __slots__ = ("before", "changed_at", "child_replica", "eligible", "now", "rate_per_replica", "replicas")

    def __init__(self, now: _Half, before: _Half) -> None:
        self.now = now
        self.before = before
        self.replicas: list[ReplicaIndex] = []
        self.eligible: ReplicaSet = 0
        self.rate_per_replica = 0.0
        self.child_replica: dict[Node, ReplicaIndex] = {}
        self.changed_at = -inf

    def retire(self) -> ReplicaIndex:
        """Drop the latest replica; returns it."""
        replica = self.replicas[-1]
        self.leave(replica)
        return replica

    def leave(self, replica: ReplicaIndex) -> None:
        self.replicas.remove(replica)
        self.child_replica = {
            child: served_by for child, served_by in self.child_replica.items() if served_by != replica
        }


@dataclass(frozen=True, slots=True)
class ReplicationChange:
    """From now on `replica` serves the prefix that ends in `node` (`added`), or no longer; `num_replicas` serve it."""

    node: Node
    replica: ReplicaIndex
    added: bool
    num_replicas: int


class Cluster(Protocol):
    """What the search asks of the cluster. `load_s`: L by replica index."""

    @property
    def eligible_replicas(self) -> Sequence[ReplicaIndex]: ...

    @property
    def load_s(self) -> Sequence[float]: ...

    def recompute_s(self, node: Node) -> float:
        """Return seconds to compute the prompt up to the end of `node` from nothing."""
        ...

    def holders(self, node: Node) -> list[ReplicaIndex]:
        """Return the replicas that cache all of `node`, ascending."""
        ...

    def window_requests(self, node: Node) -> int:
        """Return requests of the window, on all replicas, that use `node`."""
        ...

    def load_below(self, node: Node) -> Mapping[Node, float]:
        """L of the requests of the window that pass each child of `node`; without the children that none passes."""
        ...


class Rebalancer:
    """Which replicas shed load, and which replicas serve each replicated prefix.

    `num_replicated`: prefixes that are served by replicas of the rebalancer's choice: several, or one that is left.
    """

    def __init__(self, settings: RebalanceSettings, window_s: float = inf) -> None:
        self.settings = settings
        self._half_s = window_s / 2
        self._prefixes: dict[Node, _Prefix] = {}
        self._queued: dict[Node, _Prefix] = {}
        self._unchecked: list[Node] = []
        self._shedding = 0
        self.num_replicated = 0
        self._next_search: float | None = None

    def begin(self, window_s: float) -> None:
        """Compare the halves of a window of this length."""
        self._half_s = window_s / 2

    # -- on the request path ------------------------------------------------------------------------------------------

    def sheds(self, replica: ReplicaIndex, load_s: float, lightest_s: float) -> bool:
        """Return whether the replica is too loaded, compared with the lightest, to be used. With hysteresis; O(1)."""
        bit = 1 << replica
        limit = self.settings.calm if self._shedding & bit else self.settings.threshold
        if load_s > limit * lightest_s:
            self._shedding |= bit
        else:
            self._shedding &= ~bit
        return bool(self._shedding & bit)

    def replicas_of(self, path: Sequence[Node]) -> tuple[Node, list[ReplicaIndex]] | None:
        """Return the deepest replicated prefix on the path and the replicas that serve the request; None if there is
        none.
        """
        if not self.num_replicated:
            return None
        below: Node | None = None
        for node in reversed(path):
            prefix = self._prefixes.get(node)
            if prefix is not None and prefix.replicas:
                of_child = prefix.child_replica.get(below) if below is not None else None
                return node, [of_child] if of_child is not None else prefix.replicas
            below = node
        return None

    def note_queueing(self, node: Node, queueing_s: float | None, now: float, eligible: ReplicaSet) -> None:
        """A request of the prefix that ends in `node` queued for `queueing_s` before its prompt was computed.

        `queueing_s`: None where nobody saw when that was. `eligible`: the replicas that could have got it.
        """
        if not self.settings.replicate:
            return
        prefix = self._prefixes.get(node)
        if prefix is None:
            prefix = self._prefixes[node] = _Prefix(_Half(now), _Half(now - self._half_s))
        self._turn(prefix, now)
        prefix.now.num_requests += 1
        prefix.eligible = eligible
        if queueing_s is not None and now - queueing_s >= prefix.changed_at:
            prefix.now.num_timed += 1
            if queueing_s > 0.0:
                prefix.now.queueing_s += queueing_s
                self._queued[node] = prefix
        if self._next_search is None:
            self._next_search = now + self.settings.interval_s

    # -- in the background --------------------------------------------------------------------------------------------

    def next_search(self) -> float | None:
        """Return when `search` is due; None while there is nothing to watch."""
        return self._next_search

    def search(self, cluster: Cluster, now: float) -> list[ReplicationChange]:
        """Replicate prefixes that queue too long, retire those that have cooled, forget those that nobody uses.

        The prefix with the longest queueing in total comes first. Each replica takes part in one change a search: while
        it is overloaded all its prefixes queue, and moving one may be enough. O(prefixes that queued since the last).
        """
        self._forget_unasked(now)
        queued, self._queued = self._queued, {}
        hot = {n: p for n, p in queued.items() if n in self._prefixes and self._queues_too_long(n, p, cluster, now)}
        by_load = (
            sorted(cluster.eligible_replicas, key=lambda replica: (cluster.load_s[replica], replica)) if hot else []
        )
        changes: list[ReplicationChange] = []
        changed: set[ReplicaIndex] = set()
        for node, prefix in sorted(hot.items(), key=lambda item: -item[1].now.queueing_s):
            replicas = prefix.replicas or cluster.holders(node)
            lightest = None if changed.intersection(replicas) else _lighter_than_all(prefix, replicas, by_load, cluster)
            if lightest is not None and lightest not in changed:
                changes.append(self._replicate(node, prefix, [*replicas, lightest], cluster, now))
                changed.update(prefix.replicas)
        for node, prefix in self._prefixes.items():
            if len(prefix.replicas) > 1 and node not in hot and self._has_cooled(prefix, now):
                changes.append(ReplicationChange(node, prefix.retire(), added=False, num_replicas=len(prefix.replicas)))
        self._start_timing_anew(changed, cluster, now)
        self.num_replicated = sum(bool(prefix.replicas) for prefix in self._prefixes.values())
        self._next_search = now + self.settings.interval_s if self._prefixes else None
        return changes

    def remove_replica(self, replica: ReplicaIndex) -> None:
        """Forget a replica that is gone."""
        self._shedding &= ~(1 << replica)
        for prefix in self._prefixes.values():
            prefix.eligible &= ~(1 << replica)
            if replica in prefix.replicas:
                prefix.leave(replica)
        self.num_replicated = sum(bool(prefix.replicas) for prefix in self._prefixes.values())

    # -- inside -------------------------------------------------------------------------------------------------------

    def _turn(self, prefix: _Prefix, now: float) -> None:
        """Let the current half become the previous one when it is over."""
        halves = int((now - prefix.now.started_at) / self._half_s)
        if halves:
            start = prefix.now.started_at + halves * self._half_s
            prefix.before = prefix.now if halves == 1 else _Half(start - self._half_s)
            prefix.now = _Half(start)

    def _queues_too_long(self, node: Node, prefix: _Prefix, cluster: Cluster, now: float) -> bool:
        """Queueing has doubled, over enough requests, and costs more than computing the prefix on another replica."""
        self._turn(prefix, now)
        enough = self.settings.min_requests
        if prefix.now.num_timed < enough or not prefix.now.queueing_s:
            return False
        before_s = prefix.before.mean_queueing_s if prefix.before.num_timed >= enough else 0.0
        queueing_s = prefix.now.mean_queueing_s
        return queueing_s >= self.settings.queue_growth * before_s and queueing_s > cluster.recompute_s(node)

    def _replicate(
        self, node: Node, prefix: _Prefix, replicas: list[ReplicaIndex], cluster: Cluster, now: float
    ) -> ReplicationChange:
        """Let these replicas serve the prefix; the last one is new."""
        prefix.rate_per_replica = self._rate(prefix, now) / (len(replicas) - 1)
        prefix.replicas = replicas
        prefix.child_replica = _split_by_load(node, replicas, cluster)
        prefix.before, prefix.now = prefix.now, _Half(now)
        return ReplicationChange(node, replicas[-1], added=True, num_replicas=len(replicas))

    def _forget_unasked(self, now: float) -> None:
        """Drop prefixes that no request used in either half, or that have left the tree; some at a time."""
        if not self._unchecked:
            self._unchecked = list(self._prefixes)
        for _ in range(min(len(self._prefixes) // _FORGET_PARTS + 1, len(self._unchecked))):
            node = self._unchecked.pop()
            prefix = self._prefixes[node]
            self._turn(prefix, now)
            if not node.tokens or not (prefix.now.num_requests or prefix.before.num_requests):
                del self._prefixes[node]

    def _start_timing_anew(self, replicas: set[ReplicaIndex], cluster: Cluster, now: float) -> None:
        """Load has moved between these replicas: queueing times until now say nothing about later ones."""
        if not replicas:
            return
        for node, prefix in self._prefixes.items():
            if not replicas.isdisjoint(prefix.replicas or cluster.holders(node)):
                prefix.changed_at = now
                prefix.now.num_timed, prefix.now.queueing_s = 0, 0.0

    def _has_cooled(self, prefix: _Prefix, now: float) -> bool:
        self._turn(prefix, now)
        rate_per_replica = self._rate(prefix, now) / (len(prefix.replicas) - 1)
        return rate_per_replica < self.settings.retire_below * prefix.rate_per_replica

    def _rate(self, prefix: _Prefix, now: float) -> float:
        """Return requests a second, over the current half and the previous one."""
        seconds = now - prefix.before.started_at
        return (prefix.now.num_requests + prefix.before.num_requests) / seconds if seconds > 0 else 0.0


def _lighter_than_all(
    prefix: _Prefix, replicas: Sequence[ReplicaIndex], by_load: Sequence[ReplicaIndex], cluster: Cluster
) -> ReplicaIndex | None:
    """Return the lightest other replica that may serve the prefix, if it is lighter than each of `replicas`.

    `by_load`: the lightest first.
    """
    others = (replica for replica in by_load if replica not in replicas and prefix.eligible >> replica & 1)
    lightest = next(others, None)
    if lightest is None or not replicas:
        return None
    return lightest if cluster.load_s[lightest] < min(cluster.load_s[replica] for replica in replicas) else None


def _split_by_load(node: Node, replicas: list[ReplicaIndex], cluster: Cluster) -> dict[Node, ReplicaIndex]:
    """Give each shared subtree below `node` to a replica: the heaviest first, to the replica with the least so far.

    A tie goes to a replica that caches the subtree already, then to the older one. Token ids never decide, so that logs
    with renamed tokens replay. Load: L of the requests of the window, as in Algorithm 2.
    """
    given = dict.fromkeys(replicas, 0.0)
    served_by: dict[Node, ReplicaIndex] = {}
    shared = [item for item in cluster.load_below(node).items() if cluster.window_requests(item[0]) > 1]
    for child, load_s in sorted(shared, key=lambda item: -item[1]):
        holders = cluster.holders(child)
        replica = min(replicas, key=lambda one: (given[one], one not in holders, one))
        served_by[child] = replica
        given[replica] += load_s
    return served_by
