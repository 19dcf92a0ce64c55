"""The links over which replicas send KV to each other: who can, and how long a transfer waits.

A replica sends one transfer at a time, and receives one at a time. So each has two queues, and a transfer begins when
the source's and the target's are both empty.
"""

from __future__ import annotations

from math import inf
from typing import Final

from preble.core.replica_index import ReplicaIndex, ReplicaSet
from preble.core.types import Role

_IDLE: Final = -inf


class _Direction:
    """Transfers of one direction of one link. `until`: when the last of them ends."""

    __slots__ = ("num_transfers", "until")

    def __init__(self) -> None:
        self.num_transfers = 0
        self.until = _IDLE

    def add(self, until: float) -> None:
        self.num_transfers += 1
        self.until = until

    def end_one(self) -> None:
        """A transfer is over. With the last one the link is idle, whatever was expected."""
        self.num_transfers -= 1
        if not self.num_transfers:
            self.until = _IDLE


class PrefixCopy:
    """A copy of a prompt's prefix that a replica could get from another one.

    `matched_tokens`: leading prompt tokens that it would serve from its cache then, `tokens` of them copied. `link_s`:
    seconds for which the copy keeps the links busy; `seconds`: until it is there, the transfers before it included.
    `source_tokens`: for a split, leading prompt tokens that the source has cached when it begins to compute the rest;
    -1 for what is computed already.
    """

    __slots__ = ("link_s", "matched_tokens", "seconds", "source", "source_tokens", "tokens")

    def __init__(
        self,
        source: ReplicaIndex,
        matched_tokens: int,
        tokens: int,
        link_s: float,
        seconds: float,
        source_tokens: int = -1,
    ) -> None:
        self.source = source
        self.matched_tokens = matched_tokens
        self.tokens = tokens
        self.link_s = link_s
        self.seconds = seconds
        self.source_tokens = source_tokens

    @property
    def is_split(self) -> bool:
        return self.source_tokens >= 0


class Links:
    """The transfer groups, and the transfers between their members. Seconds are of the scheduler's clock.

    `groups`: the members of each group by its name; `splitting`: replicas that may split with others of their group.
    `pairing`: replicas with fixed roles, by the name of their group. They are in no group of `groups`.
    """

    def __init__(self) -> None:
        self.groups: dict[str, ReplicaSet] = {}
        self.splitting: ReplicaSet = 0
        self.pairing: dict[str, ReplicaSet] = {}
        self._sending: dict[ReplicaIndex, _Direction] = {}
        self._receiving: dict[ReplicaIndex, _Direction] = {}

    def add_replica(self, replica: ReplicaIndex, group: str, *, splits: bool = False, role: Role = Role.MIXED) -> None:
        """Add a replica to a group; "" for none. `splits`: within it. Replicas with fixed roles and no group make pairs
        with each other.
        """
        if role is not Role.MIXED:
            self.pairing[group] = self.pairing.get(group, 0) | 1 << replica
            self._sending[replica], self._receiving[replica] = _Direction(), _Direction()
        elif group:
            self.splitting |= splits << replica
            self.groups[group] = self.groups.get(group, 0) | 1 << replica
            self._sending[replica], self._receiving[replica] = _Direction(), _Direction()

    def remove_replica(self, replica: ReplicaIndex, group: str) -> None:
        """Forget a replica. No transfer goes to it or comes from it any more."""
        if self._pairs(replica, group):
            self.pairing[group] &= ~(1 << replica)
        elif group:
            self.allow(replica, group, allowed=False)
            self.splitting &= ~(1 << replica)
        if replica in self._sending:
            del self._sending[replica], self._receiving[replica]

    def join(self, source: ReplicaIndex, target: ReplicaIndex) -> bool:
        """Return whether both can take part in transfers."""
        return source != target and source in self._sending and target in self._sending

    def _pairs(self, replica: ReplicaIndex, group: str) -> bool:
        return bool(self.pairing.get(group, 0) >> replica & 1)

    def allow(self, replica: ReplicaIndex, group: str, *, allowed: bool) -> None:
        """Let a replica of a group take part in new transfers, or not. Those that are under way go on.

        Changes nothing for one with a fixed role, which can do nothing else.
        """
        if self._pairs(replica, group):
            return
        others = self.groups.pop(group, 0) & ~(1 << replica)
        if members := others | allowed << replica:
            self.groups[group] = members

    def sending_until(self, source: ReplicaIndex) -> float:
        """Return when the source will have sent all that it is to send; minus infinity where that is nothing."""
        return self._sending[source].until

    def free_at(self, source: ReplicaIndex, target: ReplicaIndex, now: float) -> float:
        """Return when a further transfer between the two could begin, `now` or later."""
        return max(now, self._sending[source].until, self._receiving[target].until)

    def start(self, source: ReplicaIndex, target: ReplicaIndex, seconds: float, now: float) -> None:
        """Let a transfer that keeps both links busy for `seconds` wait for its turn."""
        until = self.free_at(source, target, now) + seconds
        self._sending[source].add(until)
        self._receiving[target].add(until)

    def end(self, source: ReplicaIndex, target: ReplicaIndex) -> None:
        """A transfer is over, for whatever reason."""
        self._sending[source].end_one()
        self._receiving[target].end_one()

    def check(self, transfers: list[tuple[ReplicaIndex, ReplicaIndex]]) -> None:
        """Assert that these (source, target) are the transfers. For tests."""
        for replica, queue in self._sending.items():
            assert queue.num_transfers == [source for source, _ in transfers].count(replica)
        for replica, queue in self._receiving.items():
            assert queue.num_transfers == [target for _, target in transfers].count(replica)
