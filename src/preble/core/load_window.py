"""The work placed on each replica in the last H seconds, in seconds of GPU time: L of Algorithm 2.

L_i = sum over the requests placed on i in H of prefill_s(tokens missed when placed)
      + their number x decode_s(mean output length seen on i in H, mean prompt length on i in H).
Kept incrementally: O(1) a request and an expiry.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

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
    """Work placed per replica slot within the last `window_s` seconds. Arrays are indexed by slot."""

    def __init__(self, cost_model: CostModel, window_s: float = 180.0) -> None:
        if window_s <= 0:
            raise ValueError(f"window_s must be positive, got {window_s}")
        self.window_s = window_s
        self._cost_model = cost_model
        self._num_requests: NDArray[np.int64] = np.zeros(0, np.int64)
        self._prefill_s: NDArray[np.float64] = np.zeros(0)
        self._prompt_tokens: NDArray[np.int64] = np.zeros(0, np.int64)
        self._num_finished: NDArray[np.int64] = np.zeros(0, np.int64)
        self._output_tokens: NDArray[np.int64] = np.zeros(0, np.int64)
        self._placed: deque[WindowEntry] = deque()
        self._sharing: deque[WindowEntry] = deque()
        self._finished: deque[tuple[float, int, int]] = deque()
        self._all_output_tokens = 0
        self._load_s: NDArray[np.float64] | None = None

    def add_replica(self, slot: int) -> None:
        """Make room for a slot; what is counted of an earlier replica there must have been removed."""
        missing = slot + 1 - len(self._prefill_s)
        if missing > 0:
            counts = np.zeros(missing, np.int64)
            self._num_requests = np.concatenate([self._num_requests, counts])
            self._prefill_s = np.concatenate([self._prefill_s, np.zeros(missing)])
            self._prompt_tokens = np.concatenate([self._prompt_tokens, counts])
            self._num_finished = np.concatenate([self._num_finished, counts])
            self._output_tokens = np.concatenate([self._output_tokens, counts])
        self._load_s = None

    def remove_replica(self, slot: int) -> None:
        """Forget everything about the replica. O(requests in the window)."""
        for entry in self._placed:
            if entry.slot == slot:
                entry.slot = None
        self._finished = deque(item for item in self._finished if item[1] != slot)
        self._all_output_tokens -= int(self._output_tokens[slot])
        self._num_requests[slot] = self._prompt_tokens[slot] = 0
        self._num_finished[slot] = self._output_tokens[slot] = 0
        self._prefill_s[slot] = 0.0
        self._load_s = None

    @property
    def load_s(self) -> NDArray[np.float64]:
        """L: seconds of work placed per slot. Not to be written to."""
        if self._load_s is None:
            self._load_s = self._prefill_s + self.decode_load_s
        return self._load_s

    @property
    def decode_load_s(self) -> NDArray[np.float64]:
        """The decode part of L, seconds per slot."""
        outputs = np.full(len(self._prefill_s), self._mean_of_all())
        np.divide(self._output_tokens, self._num_finished, out=outputs, where=self._num_finished > 0)
        per_token_s = self._cost_model.decode_s(1.0)
        per_context_s = self._cost_model.decode_s(1.0, 1.0) - per_token_s
        return outputs * (self._num_requests * per_token_s + self._prompt_tokens * per_context_s)

    def num_requests(self, slot: int) -> int:
        """Requests placed on the replica within the window."""
        return int(self._num_requests[slot])

    def mean_output_tokens(self, slot: int) -> float:
        """Mean output length seen on the replica in the window; where none finished, of all, or the default."""
        finished = self._num_finished[slot]
        return float(self._output_tokens[slot] / finished) if finished else self._mean_of_all()

    def add(self, slot: int, now: float, missed_tokens: int, num_prompt_tokens: int, leaf: Node) -> WindowEntry:
        """Count a request that is placed now. `leaf`: the node at which its prompt ends."""
        prefill_s = self._cost_model.prefill_s(missed_tokens, num_prompt_tokens - missed_tokens)
        entry = WindowEntry(slot, now, prefill_s, num_prompt_tokens, leaf)
        self._placed.append(entry)
        self._sharing.append(entry)
        self._num_requests[slot] += 1
        self._prefill_s[slot] += prefill_s
        self._prompt_tokens[slot] += num_prompt_tokens
        self._load_s = None
        return entry

    def cancel(self, entry: WindowEntry) -> bool:
        """Take back a request whose work was not done; False if it counted no longer."""
        slot = entry.slot
        if slot is None:
            return False
        entry.slot = None
        self._num_requests[slot] -= 1
        self._prompt_tokens[slot] -= entry.num_prompt_tokens
        self._prefill_s[slot] = max(self._prefill_s[slot] - entry.prefill_s, 0.0) if self._num_requests[slot] else 0.0
        self._load_s = None
        return True

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
        starts = [self._placed[0].placed_at] if self._placed else []
        starts += [self._finished[0][0]] if self._finished else []
        return min(starts) + self.window_s if starts else None

    def entries(self) -> list[WindowEntry]:
        """What counts now, oldest first. O(n); for tests."""
        return [entry for entry in self._placed if entry.slot is not None]

    def check(self) -> None:
        """The sums agree with the entries. O(n x replicas); for tests."""
        assert self._all_output_tokens == sum(tokens for _, _, tokens in self._finished)
        for slot in range(len(self._prefill_s)):
            mine = [entry for entry in self.entries() if entry.slot == slot]
            outputs = [tokens for _, where, tokens in self._finished if where == slot]
            assert self._num_requests[slot] == len(mine)
            assert self._prompt_tokens[slot] == sum(entry.num_prompt_tokens for entry in mine)
            assert abs(self._prefill_s[slot] - sum(entry.prefill_s for entry in mine)) < 1e-6
            assert (self._num_finished[slot], self._output_tokens[slot]) == (len(outputs), sum(outputs))
            assert self.load_s[slot] >= 0.0

    def _count_output(self, slot: int, count: int, output_tokens: int) -> None:
        self._num_finished[slot] += count
        self._output_tokens[slot] += output_tokens
        self._all_output_tokens += output_tokens
        self._load_s = None

    def _mean_of_all(self) -> float:
        return self._all_output_tokens / len(self._finished) if self._finished else DEFAULT_OUTPUT_TOKENS
