"""Answers that turn out longer than expected, learned before they end.

Only answers that end tell their length, the long ones last of all. So after a start, or where long answers are new,
all would look short. Nobody counts the tokens of a running answer here, but the time since its first token tells about
how many there are, less what prompts took meanwhile: a long prompt holds all answers up. An answer that has outlived
its expectation is expected to be longer, and its prefix's later ones with it (`PrefixHistory.note_running`).
"""

from __future__ import annotations

from collections import deque
from typing import Final

from preble.core.cluster.replicas import InFlightRequest
from preble.core.cluster.state import ClusterState
from preble.core.placing.timing_samples import TimingSamples
from preble.core.prefixes.radix_tree import expected_output_tokens
from preble.core.replica_index import ReplicaIndex

OUTLIVED: Final = 2.0
"""An answer has outlived its expectation when it is about this many times as long; well above what the guess is off."""

LOOKS: Final = 2
"""Answers that are looked at for each request placed: more than one, so that the row loses those that have ended."""

MEMORY_TOKENS: Final = 10_000.0
"""How many output tokens the mean time of one is of."""


class RunningAnswers:
    """Looks at the running answers in turn, `LOOKS` at a time. O(1) but for those that have outlived: O(depth) there.

    `row`: those to look at, the next one first.

    Their expectation more than doubles then, so that each outlives it no more often than the logarithm of its length.
    """

    def __init__(self, cluster: ClusterState, timing: TimingSamples) -> None:
        self._cluster = cluster
        self._timing = timing
        self._table = cluster.replicas
        self.row: deque[InFlightRequest] = deque()
        self._seconds = 0.0
        self._tokens = 0.0

    def follow(self, entry: InFlightRequest) -> None:
        """Look at this answer from now on: its first token was seen."""
        self.row.append(entry)

    def ended(self, entry: InFlightRequest, output_tokens: int, now: float) -> None:
        """The answer is complete, and its first token was seen: learn what a token takes."""
        if output_tokens < 2:
            return
        kept = max(1.0 - output_tokens / MEMORY_TOKENS, 0.0)
        self._seconds = self._seconds * kept + self._timing.decoding_s(entry, now)
        self._tokens = self._tokens * kept + output_tokens - 1

    def withdraw(self, entry: InFlightRequest) -> None:
        """The answer will never be complete: take back what was noted of it. O(depth)."""
        if entry.noted_tokens:
            self._cluster.index.note_running(entry.leaf, -entry.noted_tokens)

    def look(self, now: float) -> None:
        """Look at the next answers in the row."""
        for _ in range(min(LOOKS, len(self.row))):
            entry = self.row.popleft()
            if not entry.has_ended:
                self.row.append(entry)
                self._look_at(entry, now)

    def _look_at(self, entry: InFlightRequest, now: float) -> None:
        took_s = self._timing.decoding_s(entry, now)
        limit = OUTLIVED * max(entry.expected_output_tokens, 1)
        if took_s * self._tokens < limit * self._seconds:  # most; the rest takes a little longer
            return
        token_s = self._token_s(entry.replica)
        if token_s == 0.0:  # a profile may say that decoding takes no time
            return
        tokens = took_s / token_s
        if tokens < limit:
            return
        self._cluster.index.note_running(entry.leaf, tokens - entry.noted_tokens)
        entry.noted_tokens, entry.noted_at = tokens, now
        path = tuple(reversed(entry.leaf.ancestors()))
        expected = expected_output_tokens(path, self._cluster.window.mean_answer_tokens)
        self._table.expect(entry, round(tokens + expected))

    def _token_s(self, replica: ReplicaIndex) -> float:
        """Return seconds that a token of an answer on the replica takes: what it took of late, and no less than
        predicted.
        """
        speeds, num_decoding = self._cluster.speeds, self._table.num_decoding[replica]
        token_s = self._cluster.cost_model.decode_iteration_s(num_decoding, self._table.decoding_tokens[replica])
        slowness = 1.0 if speeds.slowness is None else speeds.slowness[replica]
        return max(token_s * speeds.decode_pace * slowness, self._seconds / self._tokens if self._tokens else 0.0)
