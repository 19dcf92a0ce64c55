"""How often a replica's KV events are asked to start over."""

from __future__ import annotations

from math import inf

FIRST_WAIT_S = 10.0
LONGEST_WAIT_S = 640.0


class ResyncBackoff:
    """At once, then ever less often while that does not help: starting over costs the replay of thousands of messages.

    What does not help: an index at its memory budget has forgotten on purpose what the events build on.
    """

    def __init__(self) -> None:
        self._wait_s = FIRST_WAIT_S
        self._next_at = -inf

    def is_due(self, now: float) -> bool:
        """Whether to start over now; if so, that counts as done. `now`: in seconds, not going back."""
        if now < self._next_at:
            return False
        has_helped = now > self._next_at + LONGEST_WAIT_S
        self._wait_s = FIRST_WAIT_S if has_helped else min(2 * self._wait_s, LONGEST_WAIT_S)
        self._next_at = now + self._wait_s
        return True
