"""The requests in flight, and all that each of them counts for from its placement to its end.

A request in flight is known to seven parts of the scheduler. `ReplicaTable` counts it on its replica, and `LoadWindow`
in the load of the window. `PrefixIndex` counts a use of its prefix, and `CacheTracker` expects the replica to cache it.
`TimingSamples` measures how long its work takes, `RunningAnswers` looks whether its answer is longer than expected, and
`Promises` learns how far its predicted times were off.
"""

from __future__ import annotations

from math import inf
from typing import Final

from preble.core.cluster.links import PrefixCopy
from preble.core.cluster.replicas import InFlightRequest, InFlightTransfer
from preble.core.cluster.state import ClusterState
from preble.core.placing.cache_tracker import CacheTracker
from preble.core.placing.promises import Promises
from preble.core.placing.running_answers import RunningAnswers
from preble.core.placing.timing_samples import TimingSamples
from preble.core.prefixes.radix_tree import Match
from preble.core.replica_index import ReplicaIndex
from preble.core.types import LONGEST_KV_LEASE_S, PackedTokens, Request, RequestId
from preble.errors import UnknownRequest

_OVER: Final = Request(RequestId(""), PackedTokens(b""))


class _Entries(dict[RequestId, InFlightRequest]):
    """Requests in flight by id."""

    def __missing__(self, request_id: RequestId) -> InFlightRequest:
        raise UnknownRequest(f"request {request_id!r} is not in flight")


class InFlightTable:
    """Requests by id. `entries`: for reading only, and one that is not in flight raises `UnknownRequest` there;
    `num_assumed`: those of them that another gateway placed.
    """

    def __init__(self, cluster: ClusterState, tracker: CacheTracker, timing: TimingSamples, promises: Promises) -> None:
        self._cluster = cluster
        self._replicas = cluster.replicas
        self._index = cluster.index
        self._window = cluster.window
        self._tracker = tracker
        self._timing = timing
        self._promises = promises
        self._running = RunningAnswers(cluster, timing)
        self.entries = _Entries()
        self.num_assumed = 0

    def __len__(self) -> int:
        return len(self.entries)

    def start(
        self,
        request: Request,
        replica: ReplicaIndex,
        matched: int,
        prefill_s: float,
        match: Match,
        now: float,
        *,
        output_tokens: float,
        assumed_tokens: int | None = None,
        copy: PrefixCopy | None = None,
    ) -> InFlightRequest:
        """Take in a request placed on `replica`, where `matched` prompt tokens are cached; the rest takes `prefill_s`.

        `match`: of the prompt with the trees as they are now. `output_tokens`: to expect. `assumed_tokens`: if another
        gateway placed the request, the length of its prompt, whose tokens may be unknown here. `copy`: after which so
        much is cached there, None for no copy. O(prompt tokens + depth).
        """
        num_tokens = request.num_prompt_tokens if assumed_tokens is None else assumed_tokens
        expected_output_tokens = _rounded(output_tokens)
        confirmed, confirmed_used_s = self._tracker.confirmed(replica, match)
        # The replica's own report will be compared with what the index expects, whether or not that counts.
        expected = (
            matched if self._replicas.trusted >> replica & 1 else self._tracker.usable_tokens(replica, request, match)
        )
        if self._replicas.known_capacity > 0:
            # What is copied evicts as much as what is computed.
            here = matched if copy is None else matched - copy.tokens
            if copy is not None and self._replicas.decoding >> replica & 1:
                here = copy.source_tokens  # the target computes nothing
            again = max(match.num_tokens - here, 0)
            computed = num_tokens - here + output_tokens
            self._cluster.recomputation.note(computed, again, self._replicas.known_capacity)
        leaf = self._tracker.place(replica, request, match, now)
        window_entry = self._window.add(replica, now, prefill_s, num_tokens, leaf)
        entry = InFlightRequest(request, replica, now, leaf, window_entry, num_tokens - matched)
        entry.expected_output_tokens = expected_output_tokens
        entry.confirmed_tokens = min(confirmed, expected)
        entry.confirmed_used_s = confirmed_used_s
        entry.is_assumed = assumed_tokens is not None
        self.num_assumed += entry.is_assumed
        if self._running.row:
            self._running.look(now)
        if copy is not None:
            self._start_copy(entry, copy, now)
        self._timing.placed(entry)
        self.entries[request.request_id] = entry
        if self._cluster.links.splitting and (copy is None or not copy.is_split):
            self._note_standstill(replica, num_tokens - matched, matched, now)
        self._replicas.start(entry)
        return entry

    def transferred(self, entry: InFlightRequest, now: float) -> None:
        """What was to be sent to the replica has arrived. Changes nothing where nothing is on its way."""
        if entry.transfer is not None:
            entry.confirmed_tokens = max(entry.confirmed_tokens, entry.transfer.matched_tokens)
            if entry.transfer.undisturbed_tokens:
                self._timing.copied(entry.transfer.undisturbed_tokens, now - entry.placed_at, now)
            self._end_transfer(entry, now, work_done=True)

    def transfer_failed(self, entry: InFlightRequest, now: float, kept_s: float = 0.0) -> None:
        """What was to be sent does not arrive: the replica computes it. Changes nothing where nothing is on its way.

        `kept_s`: for how long the source keeps it all the same; at most `LONGEST_KV_LEASE_S` of it count.
        """
        transfer = entry.transfer
        if transfer is None:
            return
        self._replicas.correct(entry, transfer.missed_tokens, transfer.prefill_s)
        if transfer.leg is not None:
            num_tokens = entry.window_entry.num_prompt_tokens
            self._note_standstill(entry.replica, transfer.missed_tokens, num_tokens - transfer.missed_tokens, now)
        self._window.correct(entry.window_entry, transfer.prefill_s)
        self._end_transfer(entry, now, work_done=kept_s > 0.0, kept_s=min(kept_s, LONGEST_KV_LEASE_S))

    def first_token(self, entry: InFlightRequest, now: float, *, seen: bool = True) -> None:
        """The prompt is computed; further calls change nothing. `seen`: by its first token; else the end implies it."""
        if entry.first_token_at is not None:
            return
        if entry.transfer is not None:
            self._end_transfer(entry, now, work_done=True)
        self._replicas.start_decoding(entry)
        entry.first_token_at = now
        self._timing.first_token(entry, now, seen=seen)
        if seen:
            self._running.follow(entry)
            self._promises.begun(entry, now)
        self._tracker.computed(entry, now)

    def finish(self, entry: InFlightRequest, output_tokens: int, cached_tokens: int | None, now: float) -> None:
        """The request is over. `cached_tokens`: prompt tokens that it reported as cached, None if it did not."""
        work_done = output_tokens > 0 or entry.first_token_at is not None
        try:
            if entry.first_token_at is not None:
                self._timing.finished(entry, output_tokens, cached_tokens, now)
                self._promises.finished(entry, output_tokens, now)
            elif work_done:
                if entry.transfer is not None:
                    self._end_transfer(entry, now, work_done=True)
                self._timing.first_token(entry, now, seen=False)
                self._tracker.computed(entry, now)
            # A replica that only decodes reports what was cached on the source.
            if cached_tokens is not None and not self._replicas.decoding >> entry.replica & 1:
                self._tracker.compare(entry, cached_tokens, now)
            if work_done:
                if entry.batch is not None:
                    self._running.ended(entry, output_tokens, now)
                self._index.note_answer(entry.leaf, output_tokens, entry.noted_tokens, entry.noted_at)
        finally:  # a bug in what is learned must not keep the request in flight
            self._end(entry, now, work_done=work_done)
            entry.request = _OVER  # the entry may stay in a row for long, and must not keep the prompt
        if work_done:
            self._window.finish(entry.replica, now, output_tokens)

    def withdraw(self, entry: InFlightRequest, now: float) -> None:
        """The replica does not serve the request: undo what the request counts for there."""
        self._running.withdraw(entry)
        self._end(entry, now, work_done=False)

    def remove_replica(self, replica: ReplicaIndex, now: float) -> list[Request]:
        """Forget the requests in flight on a replica that is gone; returns our own. O(requests in flight).

        The rest that they count for is forgotten with the replica. What it was to send to others does not arrive.
        """
        there = [entry for entry in self.entries.values() if entry.replica == replica]
        for entry in self.entries.values():
            if entry.transfer is not None and entry.transfer.source == replica:
                if self._replicas.decoding >> entry.replica & 1:
                    self._end_transfer(entry, now, work_done=False)
                else:
                    self.transfer_failed(entry, now)
        for entry in there:
            self._end_transfer(entry, now, work_done=False)
            self._running.withdraw(entry)
            entry.has_ended = True
            if entry.request.tpot_s < inf:
                self._promises.ended(entry)
            del self.entries[entry.request.request_id]
            self.num_assumed -= entry.is_assumed
        self._timing.remove_replica(replica)
        return [entry.request for entry in there if not entry.is_assumed]

    def check(self) -> None:
        """Assert that every request counts where it should, and nowhere else. O(everything); for tests."""
        requests = list(self.entries.values())
        assert self.num_assumed == sum(entry.is_assumed for entry in requests)
        legs = [entry.transfer.leg for entry in requests if entry.transfer is not None]
        self._replicas.check(requests, [leg for leg in legs if leg is not None])
        in_use = [(request.replica, request.leaf) for request in requests]
        in_use += self._tracker.kept_uses()
        transfers = [(request, request.transfer) for request in requests if request.transfer is not None]
        in_use += [(transfer.source, transfer.leaf) for _, transfer in transfers]
        self._cluster.links.check([(transfer.source, request.replica) for request, transfer in transfers])
        uses = [(entry.replica, entry.leaf) for entry in self._window.entries() if entry.counts_use]
        for replica in self._replicas.specs:
            holders = [node for where, leaf in in_use if where == replica for node in leaf.ancestors()]
            users = [node for where, leaf in uses if where == replica for node in leaf.ancestors()]
            for entry in self._index.caches[replica].entries.values():
                assert entry.node is not None
                assert entry.ref_count == holders.count(entry.node)
                assert entry.recent_uses == users.count(entry.node)

    def _start_copy(self, entry: InFlightRequest, copy: PrefixCopy, now: float) -> None:
        """Book a copy: on both links, and as a use of the prefix on its source, which may have to compute it first."""
        here, num_tokens = copy.matched_tokens - copy.tokens, entry.window_entry.num_prompt_tokens
        leg = self._start_leg(entry, copy, now) if copy.is_split else None
        leaf = self._index.hold(copy.source, entry.leaf, copy.matched_tokens, now) if leg is None else leg.leaf
        whole_s = self._cluster.cost_model.prefill_s(num_tokens - here, here)
        links = self._cluster.links
        undisturbed = copy.tokens if leg is None and links.free_at(copy.source, entry.replica, now) == now else 0
        entry.transfer = InFlightTransfer(
            copy.source, leaf, copy.matched_tokens, num_tokens - here, whole_s, leg, undisturbed
        )
        entry.waited_for_transfer = True
        links.start(copy.source, entry.replica, copy.link_s, now)

    def _start_leg(self, entry: InFlightRequest, copy: PrefixCopy, now: float) -> InFlightRequest:
        """Book what the source of a split computes: it waits in its queue, and the prompt is in use there.

        Until its end the window has the request twice; where roles are fixed, also afterwards.
        """
        request, leaf, source, cached = entry.request, entry.leaf, copy.source, copy.source_tokens
        num_tokens = entry.window_entry.num_prompt_tokens
        self._tracker.place_too(source, leaf, now)
        prefill_s = self._cluster.cost_model.prefill_s(num_tokens - cached, cached)
        window_entry = self._window.add(source, now, prefill_s, num_tokens, leaf)
        leg = InFlightRequest(request, source, now, leaf, window_entry, num_tokens - cached)
        leg.waited_for_transfer = True  # nobody reports its first token, so it is no sample of times
        self._timing.placed(leg)
        self._replicas.start_leg(leg)
        self._note_standstill(source, num_tokens - cached, cached, now)
        return leg

    def _end_leg(self, leg: InFlightRequest, now: float, *, work_done: bool, kept_s: float) -> None:
        self._replicas.end_leg(leg)
        if work_done:
            self._timing.first_token(leg, now, seen=False)
            self._tracker.computed(leg, now)
        self._tracker.end(leg, now, work_done=work_done, kept_s=kept_s)
        if work_done and self._replicas.prefilling >> leg.replica & 1:
            return  # the window has the work of each pool
        # The window has the request on its own replica.
        if self._window.cancel(leg.window_entry) and leg.window_entry.counts_use:
            self._index.forget_use(leg.replica, leg.leaf)

    def _note_standstill(self, replica: ReplicaIndex, new_tokens: int, cached_tokens: int, now: float) -> None:
        numbers, model, live = self._replicas.num_requests, self._cluster.cost_model, self._replicas.live_replicas
        mean = sum([numbers[one] for one in live]) // len(live)
        seconds, even_s = (model.standstill_s(new_tokens, cached_tokens, n) for n in (numbers[replica], mean))
        self._cluster.standstill.note(replica, seconds, even_s, now)

    def _end_transfer(self, entry: InFlightRequest, now: float, *, work_done: bool, kept_s: float = 0.0) -> None:
        """Release what a transfer holds on the links, and on its source `kept_s` later, if there is one."""
        transfer = entry.transfer
        if transfer is not None:
            entry.transfer = None
            self._cluster.links.end(transfer.source, entry.replica)
            if transfer.leg is not None:
                self._end_leg(transfer.leg, now, work_done=work_done, kept_s=kept_s)
            else:
                self._tracker.release(transfer.source, transfer.leaf, now + kept_s, now)

    def _end(self, entry: InFlightRequest, now: float, *, work_done: bool) -> None:
        """Release what the request holds. Its load stays in the window if its work was done."""
        if entry.transfer is not None:
            self._end_transfer(entry, now, work_done=False)
        del self.entries[entry.request.request_id]
        entry.has_ended = True
        if entry.request.tpot_s < inf:
            self._promises.ended(entry)
        self.num_assumed -= entry.is_assumed
        self._replicas.end(entry)
        self._tracker.end(entry, now, work_done=work_done)
        # Last, after the release: then the index can drop what was never stored of the prompt.
        if not work_done and self._window.cancel(entry.window_entry) and entry.window_entry.counts_use:
            self._index.forget_use(entry.replica, entry.leaf)


def _rounded(number: float) -> int:
    """Do as `round`, for a number that is not negative; compiled code would ask the interpreter."""
    whole = int(number)
    rest = number - whole
    return whole + 1 if rest > 0.5 or (rest == 0.5 and whole % 2) else whole
