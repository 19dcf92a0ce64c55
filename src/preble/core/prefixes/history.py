"""What a prefix has done lately: how often it is asked for, and how long its answers are.

Both are running means that forget by themselves: nothing has to expire, and a prefix takes the same memory however
often it is used.
"""

from __future__ import annotations

from math import exp
from typing import Final

MEMORY_S: Final = 5.0
"""A use counts for this long, on average. Short, so that a prefix is known to be hot a second after it became so."""

MEMORY_ANSWERS: Final = 32.0
"""Later answers count at least 1 / this, so that the mean follows lengths that change."""

PRIOR_ANSWERS: Final = 2.0
"""How many answers the expectation from before counts for: the weight of the shorter prefix's mean."""


class PrefixHistory:
    """Uses and answers of the requests that begin with one prefix, on any replica."""

    __slots__ = ("_mean_tokens", "_num_answers", "_rate", "_used_s")

    def __init__(self, now: float) -> None:
        self._rate = 0.0
        self._used_s = now
        self._num_answers = 0.0
        self._mean_tokens = 0.0

    def copy(self) -> PrefixHistory:
        """Another one that says the same and goes its own way from now on."""
        other = PrefixHistory(self._used_s)
        other._rate, other._num_answers, other._mean_tokens = self._rate, self._num_answers, self._mean_tokens
        return other

    def note_use(self, now: float) -> None:
        """A request that begins with the prefix was placed."""
        self._rate = self.uses_per_s(now) + 1.0 / MEMORY_S
        self._used_s = now

    def uses_per_s(self, now: float) -> float:
        """Requests a second of late: each counts 1 / `MEMORY_S` at first, and less and less with time."""
        return self._rate * exp((self._used_s - now) / MEMORY_S)

    def note_answer(self, output_tokens: int) -> None:
        """A request that begins with the prefix was answered."""
        self._num_answers = min(self._num_answers + 1.0, MEMORY_ANSWERS)
        self._mean_tokens += (output_tokens - self._mean_tokens) / self._num_answers

    def expected_tokens(self, prior: float) -> float:
        """Output tokens to expect. `prior`: what to expect without this history, for a prefix with few answers."""
        total = self._num_answers * self._mean_tokens + PRIOR_ANSWERS * prior
        return total / (self._num_answers + PRIOR_ANSWERS)
