"""Targets of requests: which replicas keep them, and how predictions have turned out.

A prediction is what happens on average, and a promise has to hold nearly always. So each predicted time counts as
longer here, by what `_SURE` of the last outcomes kept. A request with a target goes to a near replica that keeps it,
and also what was promised to others there; among those the policy chooses. If none does, the policy chooses among all.
Near is where its own prompt takes hardly longer than where most of it is cached; where no near replica is soon enough,
idle ones count, too.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Final

from preble.core.cluster.replicas import InFlightRequest
from preble.core.placing.timing_samples import MIN_OUTPUT_TOKENS
from preble.core.policies.view import ClusterView
from preble.core.replica_index import ReplicaIndex, ReplicaSet
from preble.core.types import Request, RequestId

_SURE: Final = 0.98
_KEPT: Final = 256
"""Outcomes that count: some seconds of a busy cluster."""
_FEWEST: Final = 32
"""With fewer, predictions are believed as they are."""
_NEXT_TO_NOTHING_S: Final = 0.05
"""Prefill that waits at a replica and counts as nothing: a few iterations."""

_NEAR: Final = 0.3
"""Of the time left until its first token is due, so much longer may a prompt take at a replica that is near. What is
computed anew farther away keeps one promise, and takes more from the others: the turns of an agent left their caches
for it, and fewer were in time than without targets."""


class Outcomes:
    """By how many seconds times were longer than predicted, over the last requests.

    Differences, not ratios: they are about as large for short times as for long ones, since most come from the
    iterations that a request shares with others. `are_enough`: at least `_FEWEST` are
    known. `excess_s`: the excess that `_SURE` of them kept; 0 while too few are known.
    """

    __slots__ = ("_by_age", "_by_size", "are_enough", "excess_s")

    def __init__(self) -> None:
        self.are_enough = False
        self.excess_s = 0.0
        self._by_age: deque[float] = deque()
        self._by_size: list[float] = []

    def note(self, predicted_s: float, actual_s: float) -> None:
        """One more time is known. O(outcomes) to move them, which is less than a microsecond."""
        excess_s = actual_s - predicted_s
        self._by_age.append(excess_s)
        insort(self._by_size, excess_s)
        if len(self._by_age) > _KEPT:
            del self._by_size[bisect_left(self._by_size, self._by_age.popleft())]
        known = len(self._by_size)
        if known >= _FEWEST:
            self.are_enough = True
            self.excess_s = self._by_size[min(int(_SURE * known), known - 1)]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a request can nearly always have at best, in seconds.

    `ttft_s`: to its first token, on the replica that begins its answer first. `prefill_s`: those of them that its own
    prompt takes. `tpot_s`: between two tokens, on the replica that decodes fastest; `alone_tpot_s`: there, on average,
    if nothing else ran.
    """

    ttft_s: float
    prefill_s: float
    tpot_s: float
    alone_tpot_s: float

    def is_possible(self, request: Request, now: float) -> bool:
        """Return whether its target could be kept if there were nothing else to do. Where it could not, no later time
        would be better; but once its prompt is computed, the next one that begins alike may keep the target.
        """
        return now + self.prefill_s <= request.first_token_by and self.alone_tpot_s <= request.tpot_s

    def late_s(self, request: Request, now: float) -> float:
        """Return by how much its target would be missed at best if it went now; not above 0 if that can be kept."""
        late_s = now + self.ttft_s - request.first_token_by
        return late_s if self.tpot_s <= request.tpot_s else max(late_s, self.tpot_s - request.tpot_s)

    def refused_for_s(self, request: Request, now: float) -> float:
        """Return after how many seconds the request may come again; 0 where it is taken now.

        Taken is what keeps its target. What could not keep it if nothing waited is taken, too, but a prompt that is too
        long only where next to nothing waits: it would make those behind it late to whom something could be promised.
        """
        if self.is_possible(request, now):
            return max(self.late_s(request, now), 0.0)
        waits_s = self.ttft_s - self.prefill_s
        is_too_long = now + self.prefill_s > request.first_token_by
        return waits_s if is_too_long and waits_s > _NEXT_TO_NOTHING_S else 0.0

    def start_by(self, request: Request) -> float:
        """Return when the request must go to a replica for its first token to come in time."""
        return request.first_token_by - self.prefill_s


class Promises:
    """What was promised to the requests in flight, and how far predictions can be trusted."""

    def __init__(self) -> None:
        self.ttft = Outcomes()
        self.tpot = Outcomes()
        self._tpot_s: dict[ReplicaIndex, dict[RequestId, float]] = {}
        """By replica and request: seconds that each further token may take, where that was promised."""

    def placed(self, entry: InFlightRequest) -> None:
        """A request that asked for a time per token is in flight."""
        self._tpot_s.setdefault(entry.replica, {})[entry.request.request_id] = entry.request.tpot_s

    def begun(self, entry: InFlightRequest, now: float) -> None:
        """Its first token has come."""
        if entry.predicted_ttft_s > 0.0:
            self.ttft.note(entry.predicted_ttft_s, now - entry.placed_at)

    def finished(self, entry: InFlightRequest, output_tokens: int, now: float) -> None:
        """Its answer has ended. One whose first token nobody saw, since it came whole, tells nothing."""
        is_timed = entry.batch is not None and output_tokens >= MIN_OUTPUT_TOKENS
        if is_timed and entry.first_token_at is not None and entry.predicted_tpot_s > 0.0:
            self.tpot.note(entry.predicted_tpot_s, (now - entry.first_token_at) / (output_tokens - 1))

    def ended(self, entry: InFlightRequest) -> None:
        """A request that asked for a time per token is not in flight any more."""
        held = self._tpot_s.get(entry.replica, {})
        held.pop(entry.request.request_id, None)
        if not held:
            self._tpot_s.pop(entry.replica, None)

    def keeping(self, view: ClusterView) -> ReplicaSet:
        """Return the replicas that count and keep the request's targets and what was promised there; all, if none does.

        O(replicas + promises in flight).
        """
        longest_s = self._longest_s(view)
        keeping = 0
        for replica in self._counting(view, longest_s):
            if view.ttft_s(replica) <= longest_s and self._keeps_pace(view, replica):
                keeping |= 1 << replica
        return keeping or view.eligible

    def forecast(self, view: ClusterView) -> Forecast:
        """Return what the request can have at best, on the replicas that count. O(replicas)."""
        counting = self._counting(view, self._longest_s(view))
        best = min(counting, key=view.ttft_s)
        ttft_s = view.ttft_s(best)
        prefill_s = ttft_s - view.waiting_prefill_s[best]
        tpot_s = min([view.tpot_s(replica) for replica in counting])
        alone_s = min([view.tpot_s(replica, alone=True) for replica in counting])
        excess_s = self.ttft.excess_s
        return Forecast(ttft_s + excess_s, prefill_s + excess_s, tpot_s + self.tpot.excess_s, alone_s)

    def _longest_s(self, view: ClusterView) -> float:
        """Return what a prediction of the first token may be at most."""
        return view.request.first_token_by - view.now - self.ttft.excess_s

    def _counting(self, view: ClusterView, longest_s: float) -> list[ReplicaIndex]:
        """Return the near replicas, and where none is soon enough also those that do nothing: nobody pays there."""
        own_s = [view.own_prefill_s(replica) for replica in view.replicas]
        most_s = min(own_s) + _NEAR * max(view.request.first_token_by - view.now, 0.0)
        near = [replica for replica, needs_s in zip(view.replicas, own_s, strict=True) if needs_s <= most_s]
        if len(near) == len(own_s) or min(map(view.ttft_s, near)) <= longest_s:
            return near
        return [r for r in view.replicas if r in near or not view.num_requests[r]]

    def _keeps_pace(self, view: ClusterView, replica: ReplicaIndex) -> bool:
        slowest_s = view.request.tpot_s
        if held := self._tpot_s.get(replica):
            slowest_s = min(slowest_s, *held.values())
        return slowest_s == inf or view.tpot_s(replica) + self.tpot.excess_s <= slowest_s
