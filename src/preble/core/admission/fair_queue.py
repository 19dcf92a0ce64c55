"""Requests that wait for the fleet, and whose turn it is.

Each tenant has a counter of the GPU time that it made the fleet spend, divided by its weight; the one with the lowest
goes next. A prompt that is cached costs next to nothing, so who shares prefixes gets more done for the same counter.
A tenant that used less than it could have, while nobody had to wait, has a small credit for its next burst. Without a
bound a tenant that was away could shut out the others when it returns.
Of one tenant and rank, the request goes first that must start first: by its target, or by the longest wait. A target
that can no longer be kept is forgotten, so that it does not break others.
Source: Sheng et al., "Fairness in Serving Large Language Models" (virtual token counter); the credit is ours.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, merge
from math import inf
from operator import attrgetter

from preble.core.types import RequestId

_RATE_S = 10.0
"""The fleet's rate of work is measured over about this time: what is older than it counts for less than half."""
_MOST_OWED_S = 60.0
"""By the word of other gateways a tenant owes the fleet at most so much more of its time than others: no mistake there
can shut it out."""
_LEAST_BUSY_S = 1.0
"""Of having requests that wait, before the rate is believed."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """`max_waiting`: requests, of all tenants. `max_wait_s`: of one request. `credit_s`: GPU time that a
    tenant may catch up after it used less than it could have."""

    max_waiting: int = 4096
    max_wait_s: float = 60.0
    credit_s: float = 2.0


@dataclass(eq=False, slots=True)
class Waiting:
    """One request that waits. `rank`: lower goes first, whatever the tenants' counters. `cost_s`: as estimated.

    `deadline`: when it is refused. `start_by`: when it must go to be what it was promised; None where nothing was.
    `kind`: equal for requests that the same replicas can serve; those of one kind wait behind one another.
    """

    request_id: RequestId
    tenant: str
    cost_s: float
    arrived_at: float
    deadline: float
    rank: int = 0
    kind: Hashable = None
    start_by: float | None = None
    is_waiting: bool = True
    due_at: float = inf
    """Its place in the line: `start_by` while that can be kept, else the end of the longest wait."""


_due = attrgetter("due_at")


@dataclass(frozen=True, slots=True)
class TurnRefused:
    """A request that cannot be served in time. `retry_after_s`: when it might."""

    request_id: RequestId
    retry_after_s: float


class _Tenant:
    __slots__ = ("lines", "num_running", "num_waiting", "started_s", "used_s", "waiting_s", "weight")

    def __init__(self) -> None:
        self.weight = 1.0
        self.used_s = 0.0
        """Divided by the weight."""
        self.started_s = 0.0
        """Its part of what was started lately."""
        self.waiting_s = 0.0
        self.num_waiting = 0
        self.num_running = 0
        self.lines: dict[tuple[int, Hashable], list[Waiting]] = {}

    @property
    def is_active(self) -> bool:
        return self.num_waiting > 0 or self.num_running > 0


class FairQueue:
    """The requests that wait. `offer` and `next` are O(tenants). `num_replicas`: how many do the work."""

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        self.num_replicas = 0
        self._tenants: dict[str, _Tenant] = {}
        self._untold_s: dict[str, float] = {}
        self._deadlines: list[tuple[float, int, Waiting]] = []
        """When something becomes of those who wait: they are refused, or can no longer have what they were promised."""
        self._floor_s = 0.0
        """What every tenant has used or could have used. Nobody is more than the credit below it."""
        self._busy_s = self._started_s = 0.0
        """Lately: how long anybody waited, and the GPU time of what was started meanwhile."""
        self._measured_at = 0.0
        self._num_offers = 0
        self.num_waiting = 0

    @property
    def num_active(self) -> int:
        """Tenants of whom anything waits or runs. O(tenants)."""
        return sum(tenant.is_active for tenant in self._tenants.values())

    @property
    def waiting_s(self) -> float:
        """GPU time of the requests that wait. O(tenants)."""
        return sum(tenant.waiting_s for tenant in self._tenants.values())

    def set_weight(self, tenant: str, weight: float) -> None:
        """A tenant of weight 2 may have twice as much of the fleet as one of weight 1."""
        self._tenant(tenant).weight = weight

    def used_s(self, tenant: str) -> float:
        """Return the GPU time that counts as used by the tenant, divided by its weight."""
        return self._tenant(tenant).used_s

    def offer(self, entry: Waiting, now: float, in_replicas_s: float = 0.0) -> list[TurnRefused]:
        """Take a request that comes; return who is refused for that, at once: the request itself, or one that came
        before it. `in_replicas_s`: GPU time of what was started and has not begun to be answered.

        It is refused where it could not go before its deadline, or where its target cannot be kept, or only by breaking
        that of another request. Where the queue is full, the tenant that waits for the most GPU time loses its newest
        request. O(tenants), with a target also O(the tenant's requests that wait).
        """
        self._measure(0.0, now)
        tenant = self._tenant(entry.tenant)
        pace = self._pace(tenant, entry, in_replicas_s)
        wait_s = (tenant.waiting_s + entry.cost_s) * pace
        if entry.start_by is None and now + wait_s > entry.deadline:
            return [self._refusal(entry, now + wait_s - entry.deadline)]
        entry.due_at = entry.arrived_at + self.settings.max_wait_s if entry.start_by is None else entry.start_by
        if entry.start_by is not None and (late_s := self._late_s(tenant, entry, pace, now)) > 0.0:
            return [self._refusal(entry, late_s)]
        self._activate(tenant)
        self._file(tenant, entry)
        tenant.num_waiting += 1
        tenant.waiting_s += entry.cost_s
        self.num_waiting += 1
        self._wake_at(entry.deadline, entry)
        if entry.start_by is not None:
            self._wake_at(entry.start_by, entry)
        if self.num_waiting <= self.settings.max_waiting:
            return []
        greediest = max(self._waiting_tenants(), key=lambda other: other.waiting_s / other.weight)
        newest = max((line[-1] for line in greediest.lines.values()), key=lambda waiting: waiting.arrived_at)
        self.withdraw(newest)
        wait_s = (greediest.waiting_s + newest.cost_s) * self._pace(greediest, newest, in_replicas_s)
        return [self._refusal(newest, wait_s)]

    def next(self, has_room: Callable[[Waiting, bool], bool]) -> Waiting | None:
        """Take the request whose turn it is, of those with room; None if there is none.

        `has_room` is also given whether no other tenant has used less.
        The caller then reports its cost with `start`.
        """
        best: tuple[int, float, float] | None = None
        chosen: Waiting | None = None
        active = [tenant.used_s for tenant in self._tenants.values() if tenant.is_active]
        # A tenant that is alone is owed nothing: there is nobody who has used more.
        least = min(active) if len(active) > 1 else -inf
        for tenant in self._waiting_tenants():
            for line in tenant.lines.values():
                key = (line[0].rank, tenant.used_s, line[0].due_at)
                if (best is None or key < best) and has_room(line[0], tenant.used_s <= least):
                    best, chosen = key, line[0]
        if chosen is not None:
            self.withdraw(chosen)
        return chosen

    def start(self, tenant_name: str, cost_s: float, now: float) -> None:
        """A request of the tenant goes to the fleet and costs so much there."""
        tenant = self._tenant(tenant_name)
        self._activate(tenant)
        tenant.num_running += 1
        self.charge(tenant_name, cost_s)
        active = [other.used_s for other in self._tenants.values() if other.is_active]
        self._floor_s = max(self._floor_s, min(active))
        self._measure(cost_s, now)
        if self.num_waiting:
            tenant.started_s += cost_s

    def end(self, tenant_name: str, further_cost_s: float = 0.0) -> None:
        """One that was started is over, and has cost so much more (or, negative, less) than was said then."""
        self._tenant(tenant_name).num_running -= 1
        self.charge(tenant_name, further_cost_s)

    def charge(self, tenant_name: str, cost_s: float, *, elsewhere: bool = False) -> None:
        """The tenant has made the fleet work for so long. `elsewhere`: through another gateway."""
        tenant = self._tenant(tenant_name)
        if elsewhere:
            most_s = self._floor_s + _MOST_OWED_S * max(self.num_replicas, 1) / tenant.weight
            tenant.used_s = max(tenant.used_s, min(tenant.used_s + cost_s / tenant.weight, most_s))
        else:
            tenant.used_s += cost_s / tenant.weight
            self._untold_s[tenant_name] = self._untold_s.get(tenant_name, 0.0) + cost_s

    def take_untold(self) -> dict[str, float]:
        """Return the GPU time that tenants were charged here since the last call, for other gateways.

        What was given back is kept, and taken from what the tenant uses next.
        """
        untold_s = {name: cost_s for name, cost_s in self._untold_s.items() if cost_s > 0}
        self._untold_s = {name: cost_s for name, cost_s in self._untold_s.items() if cost_s < 0}
        return untold_s

    def withdraw(self, entry: Waiting) -> None:
        """A request waits no longer. Nothing happens if it does not wait."""
        if not entry.is_waiting:
            return
        entry.is_waiting = False
        tenant = self._tenants[entry.tenant]
        self._unfile(tenant, entry)
        tenant.num_waiting -= 1
        tenant.waiting_s = max(tenant.waiting_s - entry.cost_s, 0.0) if tenant.num_waiting else 0.0
        self.num_waiting -= 1

    def expire(self, now: float, in_replicas_s: float = 0.0) -> list[TurnRefused]:
        """Return those whose deadline has come; they wait no longer. `in_replicas_s`: as for `offer`.

        One that can no longer have what it was promised waits on, behind all that was promised.
        """
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, entry = heappop(self._deadlines)
            if not entry.is_waiting:
                continue
            tenant = self._tenants[entry.tenant]
            if now < entry.deadline:
                self._unfile(tenant, entry)
                entry.due_at = entry.arrived_at + self.settings.max_wait_s
                self._file(tenant, entry)
                continue
            self.withdraw(entry)
            wait_s = (tenant.waiting_s + entry.cost_s) * self._pace(tenant, entry, in_replicas_s)
            expired.append(self._refusal(entry, wait_s))
        return expired

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do next; None if never."""
        while self._deadlines and not self._deadlines[0][2].is_waiting:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # inside

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant()
            tenant.used_s = self._floor_s  # nobody gains by a new name
        return tenant

    def _waiting_tenants(self) -> list[_Tenant]:
        return [tenant for tenant in self._tenants.values() if tenant.num_waiting]

    def _activate(self, tenant: _Tenant) -> None:
        tenant.used_s = max(tenant.used_s, self._floor_s - self.settings.credit_s / tenant.weight)

    def _refusal(self, entry: Waiting, retry_after_s: float) -> TurnRefused:
        """Refuse the request. Its `retry_after_s` is at most the longest time that a request may wait here."""
        return TurnRefused(entry.request_id, min(retry_after_s, self.settings.max_wait_s))

    def _wake_at(self, when: float, entry: Waiting) -> None:
        """Look at a request again at this time."""
        self._num_offers += 1
        if when < inf:
            heappush(self._deadlines, (when, self._num_offers, entry))

    @staticmethod
    def _file(tenant: _Tenant, entry: Waiting) -> None:
        """Put a request into its line: behind those that are due at the same time."""
        insort(tenant.lines.setdefault((entry.rank, entry.kind), []), entry, key=_due)

    @staticmethod
    def _unfile(tenant: _Tenant, entry: Waiting) -> None:
        line = tenant.lines[entry.rank, entry.kind]
        line.remove(entry)
        if not line:
            del tenant.lines[entry.rank, entry.kind]

    def _late_s(self, tenant: _Tenant, entry: Waiting, pace: float, now: float) -> float:
        """Return by how much the request would start too late, or make one start too late that was promised a time.

        Each goes when the GPU time before it is done, in the order of their lines.
        """
        own_place = (entry.rank, entry.due_at)
        ahead_s = own_start_s = broken_s = 0.0
        for waiting in self._in_order(tenant):
            if (waiting.rank, waiting.due_at) > own_place:
                was_late_s = now + ahead_s * pace - waiting.due_at
                late_s = was_late_s + entry.cost_s * pace
                if waiting.start_by == waiting.due_at and was_late_s <= 0.0 < late_s:
                    broken_s = max(broken_s, late_s)
            ahead_s += waiting.cost_s
            if (waiting.rank, waiting.due_at) <= own_place:
                own_start_s = ahead_s * pace
        return max(now + own_start_s - entry.due_at, broken_s)

    @staticmethod
    def _in_order(tenant: _Tenant) -> Iterator[Waiting]:
        """Yield the tenant's requests as they would go if all replicas could serve them."""
        return merge(*tenant.lines.values(), key=lambda waiting: (waiting.rank, waiting.due_at))

    def _pace(self, tenant: _Tenant, entry: Waiting, in_replicas_s: float) -> float:
        """Return the seconds in which one second of this tenant's work is done, as if every tenant that waits got its
        share of what the fleet does a second. 0 before that is known.

        It is not known behind one long request that started before anybody waited: nothing has started since. Nor does
        the fleet do little behind one that started since: its whole prefill counts until it is over.
        """
        if self._busy_s < _LEAST_BUSY_S or self._started_s <= 0.0 or not self.num_waiting:
            return 0.0
        others = sum(other.weight for other in self._waiting_tenants() if other is not tenant)
        share = tenant.weight / (tenant.weight + others)
        if entry.start_by is not None:
            active = sum(other.weight for other in self._tenants.values() if other.is_active and other is not tenant)
            share = max(tenant.weight / (tenant.weight + active), tenant.started_s / self._started_s)
        return self._busy_s / ((self._started_s + in_replicas_s) * share)

    def _measure(self, started_s: float, now: float) -> None:
        """Count the time since the last call as busy if requests wait now; else all of it was free to use."""
        if self.num_waiting:
            fade = 0.5 ** ((now - self._measured_at) / _RATE_S)
            self._busy_s = self._busy_s * fade + now - self._measured_at
            self._started_s = self._started_s * fade + started_s
            for tenant in self._tenants.values():
                tenant.started_s *= fade
        else:
            self._floor_s += self.num_replicas * (now - self._measured_at)
        self._measured_at = now
