"""Ejection: requests avoid for a while replicas that fail, are slow, or say "not now" while others do well.

A replica that fails fast looks idle, so every policy would send it more and more. Pure: time is an argument, in seconds
and never going back; a callback reports changes.

Only a streamed answer shows when it begins, so only those make a replica slow or silent. Of an answer that comes whole,
nothing comes until it is complete, however well the replica does. Those move when a streamed probe gets no answer
either. A replica that hangs and has no streamed requests is found when the others time out (`timeouts.first_byte_s`),
which counts as failures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from preble.config import EjectionConfig
from preble.core.types import Placement, ReplicaId, RequestId
from preble.core.types.life import Ended, Fact, FirstToken, Moved, Outcome, Started, TransferFailed, Transferred
from preble.rules.callers import Followed

_MOST_SAMPLES = 64
"""Of a replica in a window: enough for a rate and a median, however busy it is."""
_STALL_FACTOR = 4.0
"""How many times the others' longest wait for a first byte a replica may be silent."""
_FAILS_MORE = 2.0
"""How many times the others' failure rate an outlier's is at least."""
LONGEST_LONE_HOLD_S = 2.0
"""Where no other replica is left, one request goes to a replica that said "not now" after at most this time."""


class Standing(StrEnum):
    """How a replica stands with the gateway."""

    IN = "in"
    EJECTED = "ejected"
    PROBING = "probing"


class EjectionReason(StrEnum):
    """Why a replica was ejected."""

    CONSECUTIVE_FAILURES = "consecutive failures"
    FAILURE_RATE = "failure rate"
    STALLED = "no answer begins"
    SLOW = "slow"
    PROBE_FAILED = "a probe failed"
    PEER = "another gateway ejected it"


@dataclass(frozen=True, slots=True)
class Change:
    """A replica's new standing. `reason` and `back_off_s`: of an ejection."""

    replica_id: ReplicaId
    standing: Standing
    reason: EjectionReason | None = None
    back_off_s: float = 0.0


class _Sent(NamedTuple):
    at: float
    expected_s: float


class _Wait(NamedTuple):
    heard_at: float
    wait_s: float
    slowness: float
    """How many times as long as expected."""


@dataclass(slots=True)
class _Replica:
    group: Hashable
    standing: Standing = Standing.IN
    num_consecutive: int = 0
    ends: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))
    """When requests ended, and whether the replica failed them."""
    waits: deque[_Wait] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))
    running: dict[RequestId, float] = field(default_factory=dict)
    """Requests sent since it joined, and when. An earlier life's may end later, and say nothing of this one."""
    unheard: dict[RequestId, _Sent] = field(default_factory=dict)
    """Streamed requests of whose answer nothing has come, the oldest first."""
    answered_at: float = 0.0
    """When a usable answer last began or was complete."""
    out_until: float = 0.0
    held_until: float = 0.0
    held_at: float = 0.0
    """When it last said "not now"."""
    tried_at: float = 0.0
    """When it last said so, or got a request all the same."""
    returned_at: float = 0.0
    num_ejections: int = 0
    probe: RequestId | None = None
    num_good_probes: int = 0

    def heard(self, request_id: RequestId, sent_at: float, now: float) -> None:
        """The first byte of a usable answer has come, or all of it."""
        self.answered_at = now
        if sent_at > self.held_at:
            self.held_until = min(self.held_until, now)
        if (sent := self.unheard.pop(request_id, None)) is not None:
            wait_s = now - sent.at
            self.waits.append(_Wait(now, wait_s, wait_s / max(sent.expected_s, 1e-3)))

    def forget_before(self, time: float) -> None:
        while self.ends and self.ends[0][0] < time:
            self.ends.popleft()
        while self.waits and self.waits[0].heard_at < time:
            self.waits.popleft()

    @property
    def num_failed(self) -> int:
        return sum(failed for _, failed in self.ends)

    @property
    def typical_slowness(self) -> float:
        return median(wait.slowness for wait in self.waits)


class EjectionTable:
    """The replicas in the rotation, and which of them get no requests now.

    Replicas are compared only within their group, which is whatever the caller gives: those that serve the same models.
    """

    def __init__(
        self,
        config: EjectionConfig,
        on_change: Callable[[Change], None] = lambda change: None,
        expected_s: Callable[[Placement], float] = lambda placement: 1.0,
    ) -> None:
        """`expected_s`: returns what the beginning of an answer should take, without a queue."""
        self._config = config
        self._expected_s = expected_s
        self._listeners = [on_change]
        self._replicas: dict[ReplicaId, _Replica] = {}
        self.suspended: set[ReplicaId] = set()
        """A superset of those to keep away from, mostly empty: each placement asks."""

    def listen(self, on_change: Callable[[Change], None]) -> None:
        """Call this with each later change, too."""
        self._listeners.append(on_change)

    def _on_change(self, change: Change) -> None:
        for listener in self._listeners:
            listener(change)

    def configure(self, config: EjectionConfig) -> None:
        """Judge in this way from now on."""
        self._config = config

    def add(self, replica_id: ReplicaId, group: Hashable = None) -> None:
        """A replica has joined, with a clean record."""
        self._replicas[replica_id] = _Replica(group)

    def set_group(self, replica_id: ReplicaId, group: Hashable) -> None:
        """A replica has other peers now. Raises: KeyError: it is not in the rotation."""
        self._replicas[replica_id].group = group

    def remove(self, replica_id: ReplicaId) -> None:
        """Forget a replica that has left. Later reports about its requests are ignored."""
        self._replicas.pop(replica_id, None)
        self.suspended.discard(replica_id)

    def standing(self, replica_id: ReplicaId) -> Standing:
        """Raises: KeyError: it is not in the rotation."""
        return self._replicas[replica_id].standing

    def times_ejected(self, replica_id: ReplicaId) -> int:
        """Return how often in a row, without a long good time between. Raises: KeyError: it is not in the rotation."""
        return self._replicas[replica_id].num_ejections

    def avoided(self, now: float) -> frozenset[ReplicaId]:
        """Return replicas that get no request now: ejected, at their one probe, or not to be asked before a time they
        gave.

        O(of those that are).
        """
        if not self.suspended:
            return frozenset()
        self._let_probe(now)
        return frozenset(r for r in self.suspended if self._is_avoided(self._replicas[r], now))

    def held(self, candidates: Collection[ReplicaId], now: float) -> dict[ReplicaId, float]:
        """Return which of the candidates said "not now", with the seconds until one request may try all the same.

        To be asked where no other replica is left: each is tried every `LONGEST_LONE_HOLD_S`, and a usable answer ends
        its hold.
        """
        held = ((r, self._replicas[r]) for r in candidates if r in self._replicas)
        untils = {r: min(replica.held_until, replica.tried_at + LONGEST_LONE_HOLD_S) for r, replica in held}
        return {r: until - now for r, until in untils.items() if until > now}

    # what happens to requests

    def on(self, placed: Followed, fact: Fact, now: float) -> None:
        """Judge the replica by what happens to a request there, and the one that computes its prompt."""
        replica_id, request_id = placed.placement.replica_id, placed.placement.request_id
        source = placed.placement.prefill_source
        if isinstance(fact, Ended):
            if fact.outcome is Outcome.OK:
                self.succeeded(replica_id, request_id, now)
                if source is not None:
                    self.succeeded(source, request_id, now)
                return
            if fact.outcome is Outcome.REFUSED:
                self.refused(placed.blamed, request_id, fact.retry_after_s, now)
            elif fact.outcome.blames_replica:
                self.failed(placed.blamed, request_id, now)
            self.dropped(replica_id, request_id, now)
            if source is not None:
                self.dropped(source, request_id, now)
        elif isinstance(fact, Transferred | TransferFailed):
            if source is not None:
                self._leg_over(source, request_id, fact, now)
        elif isinstance(fact, FirstToken):
            self.heard(replica_id, request_id, now)
        elif isinstance(fact, Started | Moved):
            if isinstance(fact, Moved) and fact.source is not None:
                self.dropped(fact.source, request_id, now)
            # Of an answer that comes whole, the wait is not judged.
            expected_s = self._expected_s(placed.placement) if (streams := placed.terms.streams) else 0.0
            self.sent(replica_id, request_id, now, expected_s, streams=streams)
            if source is not None:
                self.sent(source, request_id, now, streams=False)

    def _leg_over(
        self, source: ReplicaId, request_id: RequestId, fact: Transferred | TransferFailed, now: float
    ) -> None:
        if isinstance(fact, Transferred):
            self.succeeded(source, request_id, now)
        elif fact.failed == source:
            self.failed(source, request_id, now)
        else:
            self.dropped(source, request_id, now)

    def sent(
        self,
        replica_id: ReplicaId,
        request_id: RequestId,
        now: float,
        expected_s: float = 1.0,
        *,
        streams: bool = True,
    ) -> None:
        """A request goes to the replica. `expected_s`: what its answer's beginning should take, without a queue.

        `streams`: whether `heard` will be called when the answer begins; without, its wait is not judged. Every one is
        ended by `succeeded`, `failed`, `refused` or `dropped`.
        """
        if (replica := self._replicas.get(replica_id)) is None:
            return
        replica.running[request_id] = replica.tried_at = now
        if streams:
            replica.unheard[request_id] = _Sent(now, expected_s)
        if replica.standing is Standing.PROBING and replica.probe is None:
            replica.probe = request_id

    def heard(self, replica_id: ReplicaId, request_id: RequestId, now: float) -> None:
        """The first byte of a usable answer has come."""
        if (replica := self._replicas.get(replica_id)) is not None and request_id in replica.running:
            replica.heard(request_id, replica.running[request_id], now)

    def succeeded(self, replica_id: ReplicaId, request_id: RequestId, now: float) -> None:
        """The answer is complete and usable."""
        replica = self._replicas.get(replica_id)
        if replica is None or (sent_at := replica.running.pop(request_id, None)) is None:
            return
        replica.heard(request_id, sent_at, now)
        replica.ends.append((now, False))
        replica.num_consecutive = 0
        if replica.probe == request_id:
            replica.probe = None
            replica.num_good_probes += 1
            if replica.num_good_probes >= self._config.probes:
                self._take_back(replica_id, replica, now)

    def failed(self, replica_id: ReplicaId, request_id: RequestId, now: float) -> None:
        """The replica failed the request: an error of its own, an unusable answer, a broken connection, a timeout."""
        if (replica := self._ended(replica_id, request_id)) is None:
            return
        replica.forget_before(now - self._config.window_s)
        replica.ends.append((now, True))
        replica.num_consecutive += 1
        if replica.probe == request_id:
            self._eject(replica_id, replica, EjectionReason.PROBE_FAILED, now)
        elif replica.standing is Standing.IN:
            if replica.num_consecutive >= self._config.consecutive_failures:
                self._eject(replica_id, replica, EjectionReason.CONSECUTIVE_FAILURES, now)
            elif self._fails_more_than_others(replica):
                self._eject(replica_id, replica, EjectionReason.FAILURE_RATE, now)

    def failed_elsewhere(self, replica_id: ReplicaId, now: float) -> None:
        """Another gateway has ejected the replica: eject it here too, if allowed. Our own probes bring it back."""
        replica = self._replicas.get(replica_id)
        if replica is not None and replica.standing is Standing.IN:
            self._eject(replica_id, replica, EjectionReason.PEER, now)

    def refused(self, replica_id: ReplicaId, request_id: RequestId, retry_after_s: float, now: float) -> None:
        """The replica said "not now", which is no failure. `retry_after_s`: 0 where it did not say for how long."""
        if (replica := self._ended(replica_id, request_id)) is None:
            return
        replica.held_until = max(replica.held_until, now + min(retry_after_s, self._config.longest_hold_s))
        replica.held_at = replica.tried_at = now
        if replica.held_until > now:
            self.suspended.add(replica_id)
        if replica.probe == request_id:
            replica.probe = None

    def dropped(self, replica_id: ReplicaId, request_id: RequestId, now: float) -> None:
        """The request ended for a reason that says nothing of the replica: its client left, or it was a bad request."""
        replica = self._ended(replica_id, request_id)
        if replica is not None and replica.probe == request_id:
            replica.probe = None

    # what does not happen to requests

    def check(self, last_heard: Mapping[ReplicaId, float], now: float) -> list[ReplicaId]:
        """Eject replicas that are slow or begin no answer, while others do well. To be called every second or so.

        `last_heard`: when anything of an answer in flight last came from each replica. Returns the replicas that begin
        no answer, so that the streamed requests that wait there can be moved.
        """
        self._let_probe(now)
        for replica in self._replicas.values():
            replica.forget_before(now - self._config.window_s)
        stalled = []
        for replica_id, replica in self._replicas.items():
            if replica.standing is Standing.EJECTED:
                continue
            heard_at = max(last_heard.get(replica_id, 0.0), replica.answered_at)
            silent_since = max(heard_at, replica.returned_at)
            if self._is_stalled(replica, silent_since, now):
                probing = replica.standing is Standing.PROBING
                reason = EjectionReason.PROBE_FAILED if probing else EjectionReason.STALLED
                if self._eject(replica_id, replica, reason, now):
                    stalled.append(replica_id)
            elif replica.standing is Standing.IN and self._is_slow(replica):
                self._eject(replica_id, replica, EjectionReason.SLOW, now)
        return stalled

    # rules

    def _is_avoided(self, replica: _Replica, now: float) -> bool:
        return replica.standing is Standing.EJECTED or replica.probe is not None or replica.held_until > now

    def _peers(self, replica: _Replica) -> Iterator[_Replica]:
        """Yield the others of its group that are in."""
        for other in self._replicas.values():
            if other is not replica and other.group == replica.group and other.standing is Standing.IN:
                yield other

    def _fails_more_than_others(self, replica: _Replica) -> bool:
        if len(replica.ends) < self._config.min_requests:
            return False
        peers = list(self._peers(replica))
        num_ends = sum(len(other.ends) for other in peers)
        rate_of_peers = sum(other.num_failed for other in peers) / num_ends if num_ends else 1.0
        rate = replica.num_failed / len(replica.ends)
        return rate >= self._config.failure_rate and rate >= _FAILS_MORE * rate_of_peers

    def _is_slow(self, replica: _Replica) -> bool:
        enough = self._config.min_requests
        if len(replica.waits) < enough or median(wait.wait_s for wait in replica.waits) < self._config.slow_min_s:
            return False
        peers = [other.typical_slowness for other in self._peers(replica) if len(other.waits) >= enough]
        return bool(peers) and replica.typical_slowness >= self._config.slow_factor * median(peers)

    def _is_stalled(self, replica: _Replica, silent_since: float, now: float) -> bool:
        least = 1 if replica.standing is Standing.PROBING else self._config.consecutive_failures
        if len(replica.unheard) < least:
            return False
        oldest_at = next(sent.at for sent in replica.unheard.values())
        if oldest_at > now - self._config.stall_s:
            return False
        waits = [wait for other in self._peers(replica) for wait in other.waits]
        patience_s = max([self._config.stall_s, *(_STALL_FACTOR * wait.wait_s for wait in waits)])
        num_late = sum(max(sent.at, silent_since) <= now - patience_s for sent in replica.unheard.values())
        return num_late >= least and any(wait.heard_at > oldest_at for wait in waits)

    # changes

    def _ended(self, replica_id: ReplicaId, request_id: RequestId) -> _Replica | None:
        replica = self._replicas.get(replica_id)
        if replica is None or request_id not in replica.running:
            return None
        del replica.running[request_id]
        replica.unheard.pop(request_id, None)
        return replica

    def _may_eject(self, replica: _Replica) -> bool:
        """Return whether enough of its group are left. One that is probed counts as out already."""
        group = [other for other in self._replicas.values() if other.group == replica.group]
        num_out = sum(other.standing is not Standing.IN for other in group if other is not replica)
        return self._config.enabled and num_out + 1 <= self._config.largest_share * len(group)

    def _eject(self, replica_id: ReplicaId, replica: _Replica, reason: EjectionReason, now: float) -> bool:
        """Take it out, if that is allowed; says whether it was."""
        if not self._may_eject(replica):
            replica.probe = None
            return False
        if replica.standing is Standing.IN and now - replica.returned_at > self._config.longest_out_s:
            replica.num_ejections = 0
        back_off_s = min(self._config.first_out_s * 2.0**replica.num_ejections, self._config.longest_out_s)
        replica.num_ejections += 1
        replica.standing, replica.out_until = Standing.EJECTED, now + back_off_s
        replica.probe, replica.num_good_probes = None, 0
        self.suspended.add(replica_id)
        self._on_change(Change(replica_id, Standing.EJECTED, reason, back_off_s))
        return True

    def _let_probe(self, now: float) -> None:
        """Move on those whose time is over."""
        for replica_id in list(self.suspended):
            replica = self._replicas[replica_id]
            if replica.standing is Standing.EJECTED and now >= replica.out_until:
                replica.standing, replica.returned_at = Standing.PROBING, now
                self._on_change(Change(replica_id, Standing.PROBING))
            elif replica.standing is Standing.IN and now >= replica.held_until:
                self.suspended.discard(replica_id)

    def _take_back(self, replica_id: ReplicaId, replica: _Replica, now: float) -> None:
        replica.standing, replica.returned_at = Standing.IN, now
        replica.num_consecutive = replica.num_good_probes = 0
        replica.ends.clear()
        replica.waits.clear()
        self._on_change(Change(replica_id, Standing.IN))
