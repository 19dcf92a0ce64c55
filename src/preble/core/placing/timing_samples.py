"""Samples of how long prefills and decodes take, from live requests.

The scheduler knows when a request was placed, when its first token came and when it ended. In between the request may
have queued, or the replica may have computed other prompts. So a prefill is a sample only if no other prompt waited on
its replica from the placement to the first token. A decode is one only if other requests' prefills, those that may be
half done included, took at most half of its time; the time of those that are done is subtracted.

A replica with so long a queue that nothing is undisturbed is measured by the queue: how long it takes from the end of
one prefill to the end of a later one, with no pause between, and what the cost model predicts for the prefills that
ended meanwhile. A long prompt says nothing before its end: until then nobody knows how much of it is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from preble.core.cluster.replicas import InFlightRequest
from preble.core.cluster.speeds import LARGEST
from preble.core.cluster.state import ClusterState
from preble.core.costs.refit import CopySample, CostRefit, DecodeSample, PrefillSample
from preble.core.replica_index import ReplicaIndex

MIN_PREFILL_TOKENS: Final = 256
"""For shorter prompts the network and the server take a larger part of the time than the GPU."""

MIN_OUTPUT_TOKENS: Final = 16
"""A shorter answer tells little of the time between its tokens."""

QUEUE_S: Final = 5.0
"""Shortest time without a pause by which a queue is measured: the iterations that its ends share are short then."""


@dataclass(slots=True)
class _PlacedTimes:
    """`prefills_s`: seconds that the cost model gives for the prefills of all requests that had a first token.

    `queue_from`, `queue_until`: ends of prefills, between which there was always a prompt to compute. `queue_s`: what
    the cost model predicts for those that ended after the first.
    """

    num_placed: int = 0
    prefills_s: float = 0.0
    queue_from: float = 0.0
    queue_until: float = -inf
    queue_s: float = 0.0


class TimingSamples:
    """Turns what happens to requests into samples of times. O(1) each. A request that waits for KV from another replica
    is no sample of a prefill: its replica could not begin.

    They go to the replicas' speeds, and to `refit` where the cost model is corrected.
    """

    def __init__(self, cluster: ClusterState, refit: CostRefit | None) -> None:
        self._cluster = cluster
        self._refit = refit
        self._table = cluster.replicas
        self._replicas: dict[ReplicaIndex, _PlacedTimes] = {}

    def remove_replica(self, replica: ReplicaIndex) -> None:
        self._replicas.pop(replica, None)

    def placed(self, entry: InFlightRequest) -> None:
        """The request is about to be counted on its replica."""
        replica = self._replicas.get(entry.replica)
        if replica is None:
            replica = self._replicas[entry.replica] = _PlacedTimes()
        replica.num_placed += 1
        entry.number = replica.num_placed
        entry.num_decoding = self._table.num_decoding[entry.replica]
        entry.decoding_tokens = self._table.decoding_tokens[entry.replica]
        entry.undisturbed = not self._table.waiting_prefill_tokens[entry.replica] and not entry.waited_for_transfer

    def first_token(self, entry: InFlightRequest, now: float, *, seen: bool) -> None:
        """The replica has computed the prompt. `seen`: the token came just now; else the request's end implies it."""
        replica, prefill_s = self._replicas[entry.replica], entry.window_entry.prefill_s
        replica.prefills_s += prefill_s
        replica.queue_s += prefill_s
        if not seen:
            return
        if not entry.waited_for_transfer:  # else it may have been computed before
            self._note_queue(replica, entry, now)
        entry.batch = self._table.num_decoding[entry.replica]
        entry.batch_tokens = self._table.decoding_tokens[entry.replica]
        entry.prefills_s = replica.prefills_s
        if entry.undisturbed and replica.num_placed == entry.number:
            entry.ttft_s = now - entry.placed_at

    def copied(self, num_tokens: int, seconds: float, now: float) -> None:
        """A copy is there that waited for no other, `seconds` after its placement."""
        if self._refit is not None:
            self._refit.note_copy(CopySample(num_tokens, seconds), now)

    def _note_queue(self, replica: _PlacedTimes, entry: InFlightRequest, now: float) -> None:
        """A prefill has ended just now."""
        took_s, paused = now - replica.queue_from, entry.placed_at > replica.queue_until
        if took_s >= QUEUE_S and not paused:
            self._cluster.speeds.note(entry.replica, took_s, max(replica.queue_s, took_s / LARGEST), now)
        if took_s >= QUEUE_S or paused:
            replica.queue_from, replica.queue_s = now, 0.0
        replica.queue_until = now

    def decoding_s(self, entry: InFlightRequest, now: float) -> float:
        """Return seconds since the request's first token that no prompt took on its replica, at least.

        A prompt that is waiting may be computed for the most part, and that part has held this answer up too.
        """
        assert entry.first_token_at is not None
        others_s = self._replicas[entry.replica].prefills_s - entry.prefills_s
        return max(now - entry.first_token_at - others_s - self._table.waiting_prefill_s[entry.replica], 0.0)

    def finished(self, entry: InFlightRequest, output_tokens: int, cached_tokens: int | None, now: float) -> None:
        """The request ended well and still counts on its replica. `cached_tokens`: as reported, None if it is not."""
        if entry.ttft_s is not None:
            self._note_prefill(entry, cached_tokens, now)
        if entry.batch is not None and output_tokens >= MIN_OUTPUT_TOKENS:
            self._note_decode(entry, output_tokens, now)

    def _note_prefill(self, entry: InFlightRequest, cached_tokens: int | None, now: float) -> None:
        num_tokens = entry.request.num_prompt_tokens
        missed = entry.missed_tokens if cached_tokens is None else max(num_tokens - cached_tokens, 0)
        assert entry.ttft_s is not None
        if missed < MIN_PREFILL_TOKENS:
            return
        sample = PrefillSample(missed, num_tokens - missed, entry.num_decoding, entry.decoding_tokens, entry.ttft_s)
        predicted_s = sample.predicted_s(self._cluster.cost_model)
        self._cluster.speeds.note(entry.replica, sample.seconds, predicted_s, now, is_decode=False)
        if self._refit is not None:
            self._refit.note_prefill(sample, now)

    def _note_decode(self, entry: InFlightRequest, output_tokens: int, now: float) -> None:
        assert entry.batch is not None and entry.first_token_at is not None
        took_s = now - entry.first_token_at
        others_s = self._replicas[entry.replica].prefills_s - entry.prefills_s
        # A prompt that is waiting may be computed for the most part, and that part has held this answer up too.
        if others_s + self._table.waiting_prefill_s[entry.replica] > took_s / 2:
            return
        both = entry.batch + self._table.num_decoding[entry.replica]
        batch = max(both // 2 + (both & both // 2 & 1), 1)  # half of it, rounded to even
        prompts_tokens = (entry.batch_tokens + self._table.decoding_tokens[entry.replica]) // 2
        context_tokens = prompts_tokens + batch * (output_tokens // 2)
        sample = DecodeSample(output_tokens - 1, batch, context_tokens, took_s - others_s)
        predicted_s = sample.predicted_s(self._cluster.cost_model)
        self._cluster.speeds.note(entry.replica, sample.seconds, predicted_s, now, is_decode=True)
        if self._refit is not None:
            self._refit.note_decode(sample, now)
