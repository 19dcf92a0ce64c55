"""Which requests may be sent again: the fleet's budget of retries, and requests that replicas have died of."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf

from preble.config import RetryConfig
from preble.core.types import ReplicaId, Request
from preble.core.types.life import Ended, Fact, Outcome
from preble.rules.callers import Followed


class RetryBudget:
    """Allows a share of the placed requests to be placed again, and a small number however few there are.

    Counts in a sliding window: the current period and the part of the last one that the window still covers. Time is
    an argument, in seconds and never going back. O(1).
    """

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._period = -1
        self._requests = [0, 0]
        self._retries = [0, 0]
        """Of the last period and of the current one."""

    def configure(self, config: RetryConfig) -> None:
        """Allow so much from now on."""
        self._config = config

    def placed(self, now: float) -> None:
        """Count a request that is placed for the first time."""
        self._move_to(now)
        self._requests[1] += 1

    def placed_again(self, now: float) -> None:
        """Count a retry."""
        self._move_to(now)
        self._retries[1] += 1

    def allows_one(self, now: float) -> bool:
        """Return whether a request may be placed again now."""
        self._move_to(now)
        covered = 1.0 - now / self._config.window_s % 1.0
        allowed = self._config.least + self._config.share * _sum(self._requests, covered)
        return _sum(self._retries, covered) + 1 <= allowed

    def _move_to(self, now: float) -> None:
        period = int(now / self._config.window_s)
        if period != self._period:
            follows = period == self._period + 1
            for counts in (self._requests, self._retries):
                counts[:] = [counts[1] if follows else 0, 0]
            self._period = period


def _sum(counts: list[int], covered: float) -> float:
    last, current = counts
    return last * covered + current


ONE_INCIDENT_S = 1.0
CONFIRMED_WITHIN_S = 30.0
"""How far apart a broken connection and the end of its replica may be: some checks of its health."""
QUARANTINE_S = 300.0
"""How long the like of a request is refused after the last death."""
SUSPECTED_S = 3600.0
"""How long a death counts."""
MOST_SUSPECTS = 4096


@dataclass(slots=True)
class _Incident:
    """Replicas that died at about the same time. `suspects`: at how many deaths each had been by then."""

    began_at: float
    suspects: dict[bytes, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Suspect:
    """`last`: the last incident that it was at."""

    last: _Incident
    deaths: int = 0
    replicas: list[ReplicaId] = field(default_factory=list)


class Quarantine:
    """The suspects, those without news for longest forgotten first. Time is an argument, in seconds; O(1) but for
    suspects that are asked about."""

    def __init__(self) -> None:
        self.suspects: OrderedDict[bytes, _Suspect] = OrderedDict()
        self._incident = _Incident(-inf)
        self._broken: dict[ReplicaId, dict[bytes, float]] = {}
        """By replica that has not left: requests whose connections broke, and when."""
        self._left: dict[ReplicaId, tuple[float, _Incident]] = {}
        """By replica, when it left last."""

    def on(self, placed: Followed, fact: Fact, now: float) -> None:
        """Note an end that says something of the request: its replica broke off before it answered, or it did well."""
        if not isinstance(fact, Ended):
            return
        has_begun = placed.begun_at is not None or bool(fact.output_tokens)
        if fact.outcome is Outcome.ENGINE_GONE and placed.request.keeps_kv and not has_begun and not placed.stalls:
            like = like_of(placed.request, placed.terms.caller.name)
            self.broke(like, placed.blamed, placed.placed_at, now)
        elif fact.outcome is Outcome.OK and self.suspects:
            self.answered(like_of(placed.request, placed.terms.caller.name))

    def broke(self, like: bytes, replica_id: ReplicaId, placed_at: float, now: float) -> None:
        """A replica has broken off such a request, without an answer. `placed_at`: when it was sent there."""
        left_at, incident = self._left.get(replica_id, (-inf, self._incident))
        if placed_at <= left_at and now < left_at + CONFIRMED_WITHIN_S:
            self._died(like, replica_id, incident)
            return
        if replica_id not in self._broken:  # replicas that left before, or whose ids come no more, are not kept
            before = now - CONFIRMED_WITHIN_S
            self._broken = {other: likes for other, likes in self._broken.items() if max(likes.values()) > before}
        broken = self._broken.setdefault(replica_id, {})
        if len(broken) >= MOST_SUSPECTS:
            broken.clear()
        broken[like] = now

    def left(self, replica_id: ReplicaId, now: float) -> None:
        """A replica has left the rotation because it cannot be reached, or has restarted."""
        if now >= self._incident.began_at + ONE_INCIDENT_S:
            self._incident = _Incident(now)
        self._left = {other: left for other, left in self._left.items() if now < left[0] + CONFIRMED_WITHIN_S}
        self._left[replica_id] = (now, self._incident)
        for like, at in self._broken.pop(replica_id, {}).items():
            if now < at + CONFIRMED_WITHIN_S:
                self._died(like, replica_id, self._incident)

    def _died(self, like: bytes, replica_id: ReplicaId, incident: _Incident) -> None:
        suspect = self.suspects.get(like)
        if suspect is None or suspect.last.began_at + SUSPECTED_S < incident.began_at:
            suspect = self.suspects[like] = _Suspect(incident)
        if like not in incident.suspects:
            suspect.last = incident
            suspect.deaths += 1
            suspect.replicas = [*suspect.replicas[-1:], replica_id]
            incident.suspects[like] = suspect.deaths
        self.suspects.move_to_end(like)
        if len(self.suspects) > MOST_SUSPECTS:
            self.suspects.popitem(last=False)

    def answered(self, like: bytes) -> None:
        """Such a request was answered well."""
        self.suspects.pop(like, None)

    def held(self, like: bytes, now: float) -> list[ReplicaId]:
        """Return the replicas of which the last died of such a request; none if it may be placed."""
        while self.suspects and next(iter(self.suspects.values())).last.began_at + SUSPECTED_S < now:
            self.suspects.popitem(last=False)
        suspect = self.suspects.get(like)
        if suspect is None or suspect.deaths < 2 or now >= suspect.last.began_at + QUARANTINE_S:
            return []
        others = [deaths for other, deaths in suspect.last.suspects.items() if other != like]
        return suspect.replicas if suspect.deaths > max(others, default=0) else []


def like_of(request: Request, key: str) -> bytes:
    """Return what requests with the same prompt, namespace and key have in common. O(length)."""
    name = f"{len(request.namespace)}:{request.namespace}{key}".encode()
    return blake2b(request.prompt, digest_size=16, key=blake2b(name, digest_size=32).digest()).digest()
