"""The gaps between the tokens of a simulated replica's answers.

A sequence that decodes gets a token at the end of each iteration, so its gaps are a stretch of the iterations' lengths.
Nothing is written for each token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from preble.core.types import RequestId
from preble.lab.metrics.itl import GapCounts, gap_key


class TokenGaps:
    """Call `ended` for each iteration, `preempted` before the one that begins without them, and `take` at the end."""

    def __init__(self) -> None:
        self._ends_s: list[float] = [0.0]
        self._keys: list[int] = [0]
        """Of the time between the end of each iteration and that of the one before."""
        self._since: dict[RequestId, int] = {}
        """The iteration that gave a sequence the first token of its present stretch."""
        self._stopped: dict[RequestId, int] = {}
        """The iteration that gave a preempted sequence its last token."""
        self._counts: dict[RequestId, Counter[int]] = {}
        """Of stretches that are over, for sequences that were preempted."""

    def preempted(self, request_ids: Iterable[RequestId]) -> None:
        """These have lost their places after the iteration that ended last."""
        for request_id in request_ids:
            if request_id in self._since:
                self._counts[request_id] = self._stretch(request_id)
                self._stopped[request_id] = len(self._keys) - 1

    def ended(self, now: float, prefilled: Iterable[RequestId]) -> None:
        """An iteration has ended, and with it the prefill of these sequences, which gave each one token."""
        self._keys.append(gap_key(now - self._ends_s[-1]))
        self._ends_s.append(now)
        for request_id in prefilled:
            self._since[request_id] = len(self._keys) - 1
            stopped = self._stopped.pop(request_id, None)
            if stopped is not None:
                self._counts[request_id][gap_key(now - self._ends_s[stopped])] += 1

    def take(self, request_id: RequestId) -> GapCounts:
        """Return the gaps of an answer that ended with the last iteration, and forget it."""
        return dict(self._stretch(request_id))

    def _stretch(self, request_id: RequestId) -> Counter[int]:
        counts = self._counts.pop(request_id, Counter())
        counts.update(self._keys[self._since.pop(request_id) + 1 :])
        return counts
