"""The requests in flight, and what each counts for from its placement to its end, in every book at once.

On its replica (`ReplicaTable`), in the load of the window (`LoadWindow`), for the prefix that its prompt ends with
(`PrefixIndex`), in what the replica is believed to hold (`CacheTracker`), for the prefix for whose sake it was placed
(`Rebalancer`), and as a sample of how long work takes (`LiveTimes`).
"""

from __future__ import annotations

from preble.core.cluster.load_window import LoadWindow
from preble.core.cluster.rebalance import Rebalancer
from preble.core.cluster.replicas import InFlightRequest, ReplicaTable
from preble.core.placing.cache_tracker import CacheTracker
from preble.core.placing.timing_samples import LiveTimes
from preble.core.prefixes.index import PrefixIndex
from preble.core.prefixes.matching import confirmed_on
from preble.core.prefixes.radix_tree import Match, Node
from preble.core.types import Request, RequestId
from preble.errors import UnknownRequest


class InFlightTable:
    """Requests by id. `live_times`: None where the cost model is not corrected."""

    def __init__(
        self,
        fleet: ReplicaTable,
        index: PrefixIndex,
        window: LoadWindow,
        belief: CacheTracker,
        rebalancer: Rebalancer,
        live_times: LiveTimes | None,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._window = window
        self._belief = belief
        self._rebalancer = rebalancer
        self._live_times = live_times
        self._flights: dict[RequestId, InFlightRequest] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._flights

    def get(self, request_id: RequestId) -> InFlightRequest:
        """Raises: UnknownRequest: it is not in flight."""
        flight = self._flights.get(request_id)
        if flight is None:
            raise UnknownRequest(f"request {request_id!r} is not in flight")
        return flight

    def start(
        self,
        request: Request,
        replica: int,
        matched: int,
        prefill_s: float,
        match: Match,
        prefix: Node | None,
        now: float,
    ) -> None:
        """A request is placed. `matched`: tokens of its prompt that count as cached; `prefill_s`: to compute the rest.

        `match`: of the prompt with the trees as they are now. `prefix`: see `Choice`. O(prompt tokens + depth).
        """
        num_tokens = request.num_prompt_tokens
        confirmed, confirmed_used_s = confirmed_on(match, self._index.caches[replica])
        # What is held against the replica's own report is the belief, whether or not it counts.
        believed = matched if self._fleet.trusts(replica) else self._belief.usable_tokens(replica, request, match)
        leaf = self._belief.place(replica, request, match, now)
        entry = self._window.add(replica, now, prefill_s, num_tokens, leaf)
        flight = InFlightRequest(request, replica, now, leaf, entry, num_tokens - matched)
        flight.confirmed_tokens = min(confirmed, believed)
        flight.confirmed_used_s = confirmed_used_s
        flight.prefix = prefix
        if self._live_times is not None:
            self._live_times.placed(flight)
        self._flights[request.request_id] = flight
        self._fleet.start(flight)

    def first_token(self, flight: InFlightRequest, now: float, *, seen: bool = True) -> None:
        """Its prompt is computed; further calls change nothing. `seen`: just now; else concluded from its end."""
        if flight.first_token_at is not None:
            return
        self._fleet.first_token(flight)
        flight.first_token_at = now
        if self._live_times is not None:
            self._live_times.first_token(flight, now, seen=seen)
        if flight.prefix is not None:
            self._rebalancer.note_first_token(flight.prefix, now - flight.placed_at - flight.entry.prefill_s, now)
        self._belief.computed(flight, now)

    def finish(self, flight: InFlightRequest, output_tokens: int, cached_tokens: int | None, now: float) -> None:
        """It is over. `cached_tokens`: prompt tokens that the replica says it had cached, None if it does not say."""
        if output_tokens > 0:
            self.first_token(flight, now, seen=False)
        work_done = flight.first_token_at is not None
        if work_done and self._live_times is not None:
            self._live_times.finished(flight, output_tokens, cached_tokens, now)
        self._end(flight, now, work_done=work_done)
        if work_done:
            self._window.finish(flight.replica, now, output_tokens)
        if cached_tokens is not None:
            self._belief.compare(flight, cached_tokens, now)

    def withdraw(self, flight: InFlightRequest, now: float) -> None:
        """It was not served where it was placed, and counts for nothing there."""
        self._end(flight, now, work_done=False)

    def remove_replica(self, replica: int) -> list[Request]:
        """The replica is gone: forget what was in flight there; returns it. What else it counts for goes with the slot.

        O(requests in flight).
        """
        orphans = [flight.request for flight in self._flights.values() if flight.replica == replica]
        for request in orphans:
            del self._flights[request.request_id]
        if self._live_times is not None:
            self._live_times.remove_replica(replica)
        return orphans

    def check(self) -> None:
        """Every request counts just where it should. O(everything); for tests."""
        flights = list(self._flights.values())
        self._fleet.check(flights)
        pins = [(flight.replica, flight.leaf) for flight in flights]
        pins += self._belief.pending_reports()
        shares = [(entry.replica, entry.leaf) for entry in self._window.entries() if entry.shares]
        for replica in self._fleet.specs:
            users = [node for where, leaf in pins if where == replica for node in leaf.ancestors()]
            sharers = [node for where, leaf in shares if where == replica for node in leaf.ancestors()]
            for entry in self._index.caches[replica].entries():
                assert entry.node is not None
                assert entry.ref_count == users.count(entry.node)
                assert entry.recent_uses == sharers.count(entry.node)

    def _end(self, flight: InFlightRequest, now: float, *, work_done: bool) -> None:
        """Release everything the request holds; what it did stays in the window if it was done."""
        del self._flights[flight.request.request_id]
        self._fleet.end(flight)
        self._belief.end(flight, now, work_done=work_done)
        # Last, when its prompt is in use no more: then what was never stored of it can go.
        if not work_done and self._window.cancel(flight.entry) and flight.entry.shares:
            self._index.forget_use(flight.replica, flight.leaf)
