"""The prefix index within its memory budget: what it may grow by, and what is forgotten to make room.

What was used least recently goes first, as long as no request of the window uses it; then the window's oldest requests
count for their prefixes no longer, which frees more. Source: docs/decisions/0001.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from preble.core.cluster.load_window import LoadWindow
from preble.core.prefixes.index import PrefixIndex
from preble.core.prefixes.radix_tree import NODE_BYTES, Match
from preble.core.prefixes.replica_cache import BLOCK_BYTES, RECORD_BYTES
from preble.core.types import TOKEN_BYTES, BlocksStored, PackedTokens


class IndexBudget:
    """`num_bytes`: bound on the index's memory; None for none."""

    def __init__(self, index: PrefixIndex, window: LoadWindow, num_bytes: int | None) -> None:
        self._index = index
        self._window = window
        self._num_bytes = num_bytes

    def has_room(self, growth_bytes: int) -> bool:
        return self._num_bytes is None or self._index.num_bytes + growth_bytes <= self._num_bytes

    def make_room(self, growth_bytes: Callable[[], int], now: float) -> bool:
        """Let the index grow by so much: forget what is old. False if that is not enough.

        What is forgotten may be what the growth builds on, so it is asked for again each time.
        """
        while self._num_bytes is not None and not self.has_room(growth_bytes()):
            oldest_share_s = self._window.oldest_share_s
            if self._index.drop_oldest(now, oldest_share_s):
                continue
            if oldest_share_s == inf:
                return False
            self._index.unshare(*self._window.drop_oldest_share())
        return True


def growth_of_prompt(match: Match, prompt: PackedTokens) -> int:
    """Bytes by which the index may grow at most if the prompt, which matches that far, is placed."""
    return _growth(match, len(prompt) - match.num_tokens * TOKEN_BYTES)


def growth_of_known(match: Match) -> int:
    """Bytes by which the index may grow at most if only the whole nodes of a match are to count."""
    return len(match.whole) * RECORD_BYTES


def growth_of_stored(index: PrefixIndex, replica: int, event: BlocksStored) -> int:
    """Bytes by which the index may grow at most if the event is taken in."""
    base, depth = index.end_of_parent(replica, event) or (index.tree.root(event.namespace), 0)
    match = index.tree.match_below(base, depth, event.tokens)
    new_bytes = len(event.tokens) - (match.num_tokens - depth) * TOKEN_BYTES
    return _growth(match, new_bytes) + len(event.block_hashes) * BLOCK_BYTES


def _growth(match: Match, new_bytes: int) -> int:
    """Two nodes (a leaf, and a split or a root), a record for each node of the path and for each that is split."""
    records = len(match.path) + 2 + match.last.holders.bit_count()
    return new_bytes + 2 * NODE_BYTES + records * RECORD_BYTES
