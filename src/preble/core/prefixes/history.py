"""What a prefix has done lately: how often it is asked for, and how long its answers are.

All of it forgets by itself: nothing has to expire, and a prefix takes the same memory however often it is used.
"""

from __future__ import annotations

from math import exp
from typing import Final

MEMORY_S: Final = 5.0
"""A use counts for this long, on average. Short, so that a prefix is known to be hot a second after it became so."""

STREAK_S: Final = 60.0
"""As above, for the uses to expect, told from past ones. Long, so that a burst counts for what it was."""

MEMORY_ANSWERS: Final = 32.0
"""Later answers count at least 1 / this, so that the mean follows lengths that change."""

PRIOR_ANSWERS: Final = 2.0
"""How many answers the expectation from before counts for: the weight of the shorter prefix's mean."""


class PrefixHistory:
    """Uses and answers of the requests that begin with one prefix, on any replica. `began_s`: since when."""

    __slots__ = ("_mean_use_s", "_num_answers", "_rate", "_streak", "_tokens", "_used_s", "began_s")

    def __init__(self, now: float) -> None:
        self.began_s = now
        self._rate = 0.0
        self._used_s = now
        self._streak = 0.0
        self._mean_use_s = now
        self._num_answers = 0.0
        self._tokens = 0.0

    def copy(self) -> PrefixHistory:
        """Return a copy that says the same and goes its own way from now on."""
        other = PrefixHistory(self._used_s)
        other.began_s, other._rate = self.began_s, self._rate
        other._streak, other._mean_use_s = self._streak, self._mean_use_s
        other._num_answers, other._tokens = self._num_answers, self._tokens
        return other

    def note_use(self, now: float) -> None:
        """A request that begins with the prefix was placed."""
        past_s = self._used_s - now
        self._rate = self._rate * exp(past_s / MEMORY_S) + 1.0 / MEMORY_S
        self._streak = self._streak * exp(past_s / STREAK_S) + 1.0
        self._mean_use_s += (now - self._mean_use_s) / self._streak
        self._used_s = now

    def uses_per_s(self, now: float) -> float:
        """Return requests a second of late: each counts 1 / `MEMORY_S` at first, and less and less with time."""
        return self._rate * exp((self._used_s - now) / MEMORY_S)

    def later_uses(self, now: float, ready_s: float) -> float:
        """Uses to expect that come `ready_s` from now or later.

        What has gone on for `lasted_s` goes on for `ready_s` more with a chance of lasted_s / (lasted_s + ready_s). We
        square it: a copy for a burst that ends harms everybody else, and one that comes late harms only the burst.
        """
        lasted_s = 2.0 * (now - self._mean_use_s)
        streak = self._streak * exp((self._used_s - now) / STREAK_S)
        return streak * (lasted_s / (lasted_s + ready_s)) ** 2 if lasted_s > 0 else 0.0

    def note_running(self, more_tokens: float) -> None:
        """An answer to a request that begins with the prefix has this many tokens more than was noted, and goes on.

        So tokens are counted before the answer is. Where lengths have an exponential tail, all tokens / answers that
        ended is their mean, however many go on (the estimate for censored data).
        """
        self._tokens = max(self._tokens + more_tokens, 0.0)  # less, where what was noted is taken back

    def note_answer(self, more_tokens: float) -> None:
        """A request that begins with the prefix was answered. `more_tokens`: than were noted while it ran."""
        if self._num_answers + 1.0 > MEMORY_ANSWERS:
            self._tokens *= 1.0 - 1.0 / MEMORY_ANSWERS
        else:
            self._num_answers += 1.0
        self._tokens = max(self._tokens + more_tokens, 0.0)

    @property
    def lengths(self) -> tuple[float, float]:
        """How many answers count, and their output tokens together."""
        return self._num_answers, self._tokens

    def recall(self, answers: float, output_tokens: float) -> None:
        """Begin with what was learned of the prefix before."""
        self._num_answers = min(max(answers, 0.0), MEMORY_ANSWERS)
        self._tokens = max(output_tokens, 0.0)

    def expected_tokens(self, prior: float) -> float:
        """Return output tokens to expect. `prior`: what to expect without this history, if there are few answers."""
        return (self._tokens + PRIOR_ANSWERS * prior) / (self._num_answers + PRIOR_ANSWERS)


class PromptPiece:
    """A piece of a prompt that earlier requests had at the same place: tokens `start` to `end`.

    The last piece may be longer than what the prompt has of it. `holders`: how many replicas cache all of it.
    `uses_per_s`: requests a second of late that begin with the prefix that ends here.
    """

    __slots__ = ("_history", "_now", "end", "holders", "start", "uses_per_s")

    def __init__(self, start: int, end: int, holders: int, history: PrefixHistory | None, now: float) -> None:
        self.start = start
        self.end = end
        self.holders = holders
        self.uses_per_s = history.uses_per_s(now) if history is not None else 0.0
        self._history, self._now = history, now

    def later_uses(self, ready_s: float) -> float:
        """Return how many such requests to expect `ready_s` from now or later, if they go on as long as they have."""
        return self._history.later_uses(self._now, ready_s) if self._history is not None else 0.0
