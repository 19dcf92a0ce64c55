"""Which live requests tell how long a prefill or a decode takes, and which were only waiting.

What the scheduler sees of a request is when it was placed, when its first token came and when it ended. In between it
may have queued, or others' prompts may have been computed. A prefill counts only if no other prompt was waiting on its
replica at any time until its first token; a decode counts without the prefills that came in between, and only if those
are the lesser part.
"""

from __future__ import annotations

from dataclasses import dataclass

from preble.core.cluster.replicas import InFlightRequest, ReplicaTable, Watch
from preble.core.costs.refit import CostRefit, DecodeSample, PrefillSample

MIN_PREFILL_TOKENS = 256
"""Shorter prompts tell more of the network and the server than of the GPU."""

MIN_OUTPUT_TOKENS = 16


@dataclass(slots=True)
class _Replica:
    """`prefills_s`: seconds that the prefills of all requests with a first token took, as the model says."""

    num_placed: int = 0
    prefills_s: float = 0.0


class LiveTimes:
    """Turns what happens to requests into samples for a `CostRefit`. O(1) each."""

    def __init__(self, refit: CostRefit, fleet: ReplicaTable) -> None:
        self._refit = refit
        self._fleet = fleet
        self._replicas: dict[int, _Replica] = {}

    def remove_replica(self, replica: int) -> None:
        self._replicas.pop(replica, None)

    def placed(self, flight: InFlightRequest) -> None:
        """The request is about to be counted on its replica."""
        replica = self._replicas.setdefault(flight.replica, _Replica())
        replica.num_placed += 1
        is_first = not self._fleet.waiting_prefill_tokens[flight.replica]
        flight.watch = Watch(replica.num_placed, self._fleet.num_decoding[flight.replica], is_first)

    def first_token(self, flight: InFlightRequest, now: float, *, seen: bool) -> None:
        """The replica has computed the prompt. `seen`: just now; else it is concluded from the request's end."""
        replica = self._replicas[flight.replica]
        replica.prefills_s += flight.entry.prefill_s
        if not seen:
            return
        watch = _watch(flight)
        watch.batch = self._fleet.num_decoding[flight.replica]
        watch.prefills_s = replica.prefills_s
        if watch.undisturbed and replica.num_placed == watch.number:
            watch.ttft_s = now - flight.placed_at

    def finished(self, flight: InFlightRequest, output_tokens: int, cached_tokens: int | None, now: float) -> None:
        """The request ended well and is still counted on its replica. `cached_tokens`: as reported, None if not."""
        watch = _watch(flight)
        self._note_prefill(flight, watch, cached_tokens, now)
        self._note_decode(flight, watch, output_tokens, now)

    def _note_prefill(self, flight: InFlightRequest, watch: Watch, cached_tokens: int | None, now: float) -> None:
        num_tokens = flight.request.num_prompt_tokens
        missed = flight.missed_tokens if cached_tokens is None else max(num_tokens - cached_tokens, 0)
        if watch.ttft_s is None or missed < MIN_PREFILL_TOKENS:
            return
        # The others' contexts are not known here; on average they are like this one.
        context_tokens = watch.num_decoding * num_tokens
        sample = PrefillSample(missed, num_tokens - missed, watch.num_decoding, context_tokens, watch.ttft_s)
        self._refit.note_prefill(sample, now)

    def _note_decode(self, flight: InFlightRequest, watch: Watch, output_tokens: int, now: float) -> None:
        if watch.batch is None or flight.first_token_at is None or output_tokens < MIN_OUTPUT_TOKENS:
            return
        took_s = now - flight.first_token_at
        others_s = self._replicas[flight.replica].prefills_s - watch.prefills_s
        if others_s > took_s / 2:
            return
        batch = max(round((watch.batch + self._fleet.num_decoding[flight.replica]) / 2), 1)
        context_tokens = batch * (flight.request.num_prompt_tokens + output_tokens // 2)
        self._refit.note_decode(DecodeSample(output_tokens - 1, batch, context_tokens, took_s - others_s), now)


def _watch(flight: InFlightRequest) -> Watch:
    assert flight.watch is not None, "it was placed before its times were taken"
    return flight.watch
