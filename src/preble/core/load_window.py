"""The work placed on each replica in the last H seconds, in seconds of GPU time: L of Algorithm 2.

L_i = sum over the requests placed on i in H of prefill_s(tokens missed when placed)
      + their number x decode_s(mean output length seen on i in H, mean prompt length on i in H).
Kept incrementally: O(1) a request and an expiry.
"""

from __future__ import annotations

from collections import deque

from preble.core.cost_model import CostModel
from preble.core.radix_tree import Node

DEFAULT_OUTPUT_TOKENS = 45.0
"""Assumed output length before any request has finished. Source: the published code's default."""


class WindowEntry:
    """One request in the window. `slot` is None once it counts no longer; `shares`: it counts for its prefix, too."""

    __slots__ = ("leaf", "num_prompt_tokens", "placed_at", "prefill_s", "shares", "slot")

    def __init__(self, slot: int, placed_at: float, prefill_s: float, num_prompt_tokens: int, leaf: Node) -> None:
        self.slot: int | None = slot
        self.placed_at = placed_at
        self.prefill_s = prefill_s
        self.num_prompt_tokens = num_prompt_tokens
        self.leaf = leaf
        self.shares = True


class LoadWindow:
    """Work placed per replica slot within the last `window_s` seconds. Lists are indexed by slot, for reading only.

    `load_s`: L. `decode_load_s`: its decode part. `num_requests`: requests in the window. `mean_output_tokens`: mean
    output length seen in the window; where none finished, that of all replicas when the slot last changed, or the
    default. `expected_output_tokens`: the same as a whole number.
    """

    def __init__(self, cost_model: CostModel, window_s: float = 180.0) -> None:
        if window_s <= 0:
            raise ValueError(f"window_s must be positive, got {window_s}")
        self.window_s = window_s
        self.load_s: list[float] = []
        self.decode_load_s: list[float] = []
        self.num_requests: list[int] = []
        self.mean_output_tokens: list[float] = []
        self.expected_output_tokens: list[int] = []
        self._cost_model = cost_model
        self._prefill_s: list[float] = []
        self._prompt_tokens: list[int] = []
        self._num_finished: list[int] = []
        self._output_tokens: list[int] = []
        self._placed: deque[WindowEntry] = deque()
        self._sharing: deque[WindowEntry] = deque()
        self._finished: deque[tuple[float, int, int]] = deque()
        self._all_output_tokens = 0
        self._num_placed = 0
        self._began_at: float | None = None

    def use(self, cost_model: CostModel) -> None:
        """Reckon with another model from now on. O(replicas).

        Decoding is reckoned anew for all that is in the window; prefills keep the seconds they were added with.
        """
        self._cost_model = cost_model
        for slot in range(len(self.load_s)):
            self._update(slot)

    def add_replica(self, slot: int) -> None:
        """Make room for a slot; what is counted of an earlier replica there must have been removed."""
        if slot == len(self.load_s):
            for sums in (self.load_s, self.decode_load_s, self.mean_output_tokens, self._prefill_s):
                sums.append(0.0)
            for counts in (
                self.num_requests,
                self.expected_output_tokens,
                self._prompt_tokens,
                self._num_finished,
                self._output_tokens,
            ):
                counts.append(0)
        self._update(slot)

    def remove_replica(self, slot: int) -> None:
        """Forget everything about the replica. O(requests in the window)."""
        for entry in self._placed:
            if entry.slot == slot:
                entry.slot = None
        self._finished = deque(item for item in self._finished if item[1] != slot)
        self._all_output_tokens -= self._output_tokens[slot]
        self._num_placed -= self.num_requests[slot]
        self.num_requests[slot] = self._prompt_tokens[slot] = 0
        self._num_finished[slot] = self._output_tokens[slot] = 0
        self._prefill_s[slot] = 0.0
        self._update(slot)

    def add(self, slot: int, now: float, prefill_s: float, num_prompt_tokens: int, leaf: Node) -> WindowEntry:
        """Count a request that is placed now. `prefill_s`: of what it misses. `leaf`: where its prompt ends."""
        if self._began_at is None:
            self._began_at = now
        entry = WindowEntry(slot, now, prefill_s, num_prompt_tokens, leaf)
        self._placed.append(entry)
        self._sharing.append(entry)
        self._num_placed += 1
        self.num_requests[slot] += 1
        self._prefill_s[slot] += prefill_s
        self._prompt_tokens[slot] += num_prompt_tokens
        self._update(slot)
        return entry

    def cancel(self, entry: WindowEntry) -> bool:
        """Take back a request whose work was not done; False if it counted no longer."""
        slot = entry.slot
        if slot is None:
            return False
        entry.slot = None
        self._num_placed -= 1
        self.num_requests[slot] -= 1
        self._prompt_tokens[slot] -= entry.num_prompt_tokens
        self._prefill_s[slot] = max(self._prefill_s[slot] - entry.prefill_s, 0.0) if self.num_requests[slot] else 0.0
        self._update(slot)
        return True

    def requests_per_s(self, now: float) -> float:
        """Mean rate of what was placed in the window, on all replicas. O(1).

        Over the time since the first request where that is shorter than the window, though a second at least.
        """
        if self._began_at is None:
            return 0.0
        return self._num_placed / min(max(now - self._began_at, 1.0), self.window_s)

    def finish(self, slot: int, now: float, output_tokens: int) -> None:
        """Note the output length of a request that ended on the replica."""
        self._finished.append((now, slot, output_tokens))
        self._count_output(slot, 1, output_tokens)

    def expire(self, now: float) -> list[tuple[int, Node]]:
        """Drop what is older than the window; returns (slot, leaf) of the requests that shared. Amortised O(1)."""
        dropped: list[tuple[int, Node]] = []
        while self._placed and self._placed[0].placed_at + self.window_s <= now:
            entry = self._placed.popleft()
            slot = entry.slot
            if self.cancel(entry) and slot is not None and entry.shares:
                dropped.append((slot, entry.leaf))
        self._skip_unshared()
        while self._finished and self._finished[0][0] + self.window_s <= now:
            _, slot, output_tokens = self._finished.popleft()
            self._count_output(slot, -1, -output_tokens)
        return dropped

    @property
    def oldest_share_s(self) -> float:
        """When the oldest request that counts for its prefix was placed; infinity if there is none."""
        self._skip_unshared()
        return self._sharing[0].placed_at if self._sharing else float("inf")

    def drop_oldest_share(self) -> tuple[int, Node]:
        """Let the oldest request count for its prefix no longer, only for its replica's load; returns (slot, leaf)."""
        self._skip_unshared()
        entry = self._sharing.popleft()
        entry.shares = False
        assert entry.slot is not None
        return entry.slot, entry.leaf

    def _skip_unshared(self) -> None:
        while self._sharing and (self._sharing[0].slot is None or not self._sharing[0].shares):
            self._sharing.popleft()

    def next_expiry(self) -> float | None:
        """When the oldest entry leaves the window; None if it is empty."""
        if not self._finished:
            return self._placed[0].placed_at + self.window_s if self._placed else None
        finished_at = self._finished[0][0]
        oldest = min(self._placed[0].placed_at, finished_at) if self._placed else finished_at
        return oldest + self.window_s

    def entries(self) -> list[WindowEntry]:
        """What counts now, oldest first. O(n); for tests."""
        return [entry for entry in self._placed if entry.slot is not None]

    def check(self) -> None:
        """The sums agree with the entries. O(n x replicas); for tests."""
        assert self._num_placed == sum(self.num_requests)
        assert self._all_output_tokens == sum(tokens for _, _, tokens in self._finished)
        for slot in range(len(self.load_s)):
            mine = [entry for entry in self.entries() if entry.slot == slot]
            outputs = [tokens for _, where, tokens in self._finished if where == slot]
            assert self.num_requests[slot] == len(mine)
            assert self._prompt_tokens[slot] == sum(entry.num_prompt_tokens for entry in mine)
            assert abs(self._prefill_s[slot] - sum(entry.prefill_s for entry in mine)) < 1e-6
            assert (self._num_finished[slot], self._output_tokens[slot]) == (len(outputs), sum(outputs))
            mean_prompt_tokens = self._prompt_tokens[slot] / len(mine) if mine else 0.0
            decode_s = len(mine) * self._cost_model.decode_s(self.mean_output_tokens[slot], mean_prompt_tokens)
            assert abs(self.load_s[slot] - self._prefill_s[slot] - decode_s) < 1e-6

    def _count_output(self, slot: int, count: int, output_tokens: int) -> None:
        self._num_finished[slot] += count
        self._output_tokens[slot] += output_tokens
        self._all_output_tokens += output_tokens
        self._update(slot)

    def _update(self, slot: int) -> None:
        """Bring what is derived from a slot's sums up to date. O(1)."""
        if self._num_finished[slot]:
            mean = self._output_tokens[slot] / self._num_finished[slot]
        else:
            mean = self._all_output_tokens / len(self._finished) if self._finished else DEFAULT_OUTPUT_TOKENS
        count = self.num_requests[slot]
        decode_s = count * self._cost_model.decode_s(mean, self._prompt_tokens[slot] / count) if count else 0.0
        self.mean_output_tokens[slot] = mean
        self.expected_output_tokens[slot] = round(mean)
        self.decode_load_s[slot] = decode_s
        self.load_s[slot] = self._prefill_s[slot] + decode_s
