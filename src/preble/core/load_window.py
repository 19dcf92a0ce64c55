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
    """One request in the window. `slot` is None once it counts no longer."""

    __slots__ = ("leaf", "num_prompt_tokens", "placed_at", "prefill_s", "slot")

    def __init__(self, slot: int, placed_at: float, prefill_s: float, num_prompt_tokens: int, leaf: Node) -> None:
        self.slot: int | None = slot
        self.placed_at = placed_at
        self.prefill_s = prefill_s
        self.num_prompt_tokens = num_prompt_tokens
        self.leaf = leaf


class _Totals:
    """Sums over the window for one replica."""

    __slots__ = ("num_finished", "num_requests", "output_tokens", "prefill_s", "prompt_tokens")

    def __init__(self) -> None:
        self.num_requests = 0
        self.prefill_s = 0.0
        self.prompt_tokens = 0
        self.num_finished = 0
        self.output_tokens = 0


class LoadWindow:
    """Work placed per replica slot within the last `window_s` seconds.

    `load_s`, `decode_load_s`: seconds per slot, all the work and its decode part.
    """

    def __init__(self, cost_model: CostModel, window_s: float = 180.0) -> None:
        if window_s <= 0:
            raise ValueError(f"window_s must be positive, got {window_s}")
        self.window_s = window_s
        self.load_s: NDArray[np.float64] = np.zeros(0)
        self.decode_load_s: NDArray[np.float64] = np.zeros(0)
        self._cost_model = cost_model
        self._totals: dict[int, _Totals] = {}
        self._all = _Totals()
        self._without_outputs: dict[int, None] = {}
        self._placed: deque[WindowEntry] = deque()
        self._finished: deque[tuple[float, int, int]] = deque()

    def add_replica(self, slot: int) -> None:
        if slot >= len(self.load_s):
            missing = slot + 1 - len(self.load_s)
            self.load_s = np.concatenate([self.load_s, np.zeros(missing)])
            self.decode_load_s = np.concatenate([self.decode_load_s, np.zeros(missing)])
        self._totals[slot] = _Totals()
        self._without_outputs[slot] = None

    def remove_replica(self, slot: int) -> None:
        """Forget everything about the replica. O(requests in the window)."""
        for entry in self._placed:
            if entry.slot == slot:
                entry.slot = None
        outputs = [tokens for _, where, tokens in self._finished if where == slot]
        self._all.num_finished -= len(outputs)
        self._all.output_tokens -= sum(outputs)
        self._finished = deque(item for item in self._finished if item[1] != slot)
        del self._totals[slot]
        self._without_outputs.pop(slot, None)
        self.load_s[slot] = self.decode_load_s[slot] = 0.0

    def num_requests(self, slot: int) -> int:
        """Requests placed on the replica within the window."""
        return self._totals[slot].num_requests

    def mean_output_tokens(self, slot: int) -> float:
        """Mean output length seen on the replica in the window; where none finished, of all, or the default."""
        for totals in (self._totals[slot], self._all):
            if totals.num_finished:
                return totals.output_tokens / totals.num_finished
        return DEFAULT_OUTPUT_TOKENS

    def add(self, slot: int, now: float, missed_tokens: int, num_prompt_tokens: int, leaf: Node) -> WindowEntry:
        """Count a request that is placed now. `leaf`: the node at which its prompt ends."""
        prefill_s = self._cost_model.prefill_s(missed_tokens, num_prompt_tokens - missed_tokens)
        entry = WindowEntry(slot, now, prefill_s, num_prompt_tokens, leaf)
        self._placed.append(entry)
        totals = self._totals[slot]
        totals.num_requests += 1
        totals.prefill_s += prefill_s
        totals.prompt_tokens += num_prompt_tokens
        self._update(slot)
        return entry

    def cancel(self, entry: WindowEntry) -> bool:
        """Take back a request whose work was not done; False if it counted no longer."""
        slot = entry.slot
        if slot is None:
            return False
        entry.slot = None
        totals = self._totals[slot]
        totals.num_requests -= 1
        totals.prompt_tokens -= entry.num_prompt_tokens
        totals.prefill_s = totals.prefill_s - entry.prefill_s if totals.num_requests else 0.0
        self._update(slot)
        return True

    def finish(self, slot: int, now: float, output_tokens: int) -> None:
        """Note the output length of a request that ended on the replica."""
        self._finished.append((now, slot, output_tokens))
        self._count_output(slot, 1, output_tokens)

    def expire(self, now: float) -> list[tuple[int, Node]]:
        """Drop what is older than the window; returns (slot, leaf) of each request dropped. Amortised O(1)."""
        limit = now - self.window_s
        dropped: list[tuple[int, Node]] = []
        while self._placed and self._placed[0].placed_at <= limit:
            entry = self._placed.popleft()
            slot = entry.slot
            if self.cancel(entry) and slot is not None:
                dropped.append((slot, entry.leaf))
        while self._finished and self._finished[0][0] <= limit:
            _, slot, output_tokens = self._finished.popleft()
            self._count_output(slot, -1, -output_tokens)
        return dropped

    def next_expiry(self) -> float | None:
        """When the oldest entry leaves the window; None if it is empty."""
        starts = [self._placed[0].placed_at] if self._placed else []
        starts += [self._finished[0][0]] if self._finished else []
        return min(starts) + self.window_s if starts else None

    def entries(self) -> list[WindowEntry]:
        """What counts now, oldest first. O(n); for tests."""
        return [entry for entry in self._placed if entry.slot is not None]

    def check(self) -> None:
        """The sums agree with the entries. O(n); for tests."""
        for slot, totals in self._totals.items():
            mine = [entry for entry in self.entries() if entry.slot == slot]
            assert totals.num_requests == len(mine)
            assert totals.prompt_tokens == sum(entry.num_prompt_tokens for entry in mine)
            assert abs(totals.prefill_s - sum(entry.prefill_s for entry in mine)) < 1e-6
            outputs = [tokens for _, where, tokens in self._finished if where == slot]
            assert (totals.num_finished, totals.output_tokens) == (len(outputs), sum(outputs))
            assert self.load_s[slot] >= 0.0
        assert self._all.num_finished == len(self._finished)

    def _count_output(self, slot: int, count: int, output_tokens: int) -> None:
        for totals in (self._totals[slot], self._all):
            totals.num_finished += count
            totals.output_tokens += output_tokens
        if self._totals[slot].num_finished:
            self._without_outputs.pop(slot, None)
        else:
            self._without_outputs[slot] = None
        for other in {**self._without_outputs, slot: None}:
            self._update(other)

    def _update(self, slot: int) -> None:
        totals = self._totals[slot]
        count = totals.num_requests
        if not count:
            self.load_s[slot] = self.decode_load_s[slot] = 0.0
            return
        decode_s = count * self._cost_model.decode_s(self.mean_output_tokens(slot), totals.prompt_tokens / count)
        self.decode_load_s[slot] = decode_s
        self.load_s[slot] = totals.prefill_s + decode_s
