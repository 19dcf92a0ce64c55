"""How many retries the fleet gets, so that retries cannot multiply an outage."""

from __future__ import annotations

from preble.config import RetryConfig


class RetryBudget:
    """Allows a share of the placed requests to be placed again, and a small number however few there are.

    Counts in a sliding window: the current period and the part of the last one that the window still covers. Time is
    an argument, in seconds and never going back. O(1).
    """

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._period = -1
        self._requests = [0, 0]
        self._retries = [0, 0]
        """Of the last period and of the current one."""

    def configure(self, config: RetryConfig) -> None:
        """Allow so much from now on."""
        self._config = config

    def placed(self, now: float) -> None:
        """Count a request that is placed for the first time."""
        self._move_to(now)
        self._requests[1] += 1

    def placed_again(self, now: float) -> None:
        """Count a retry."""
        self._move_to(now)
        self._retries[1] += 1

    def allows_one(self, now: float) -> bool:
        """Return whether a request may be placed again now."""
        self._move_to(now)
        covered = 1.0 - now / self._config.window_s % 1.0
        allowed = self._config.least + self._config.share * _sum(self._requests, covered)
        return _sum(self._retries, covered) + 1 <= allowed

    def _move_to(self, now: float) -> None:
        period = int(now / self._config.window_s)
        if period != self._period:
            follows = period == self._period + 1
            for counts in (self._requests, self._retries):
                counts[:] = [counts[1] if follows else 0, 0]
            self._period = period


def _sum(counts: list[int], covered: float) -> float:
    last, current = counts
    return last * covered + current
