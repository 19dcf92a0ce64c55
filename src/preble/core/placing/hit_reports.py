"""What a replica's answers report about its cache: how many tokens were cached, and in what units it counts them.

An engine counts whole blocks, and some never serve the last one that they have (speculative decoding). So a report that
is a little lower than expected, each time, is no eviction. The block size is learned from the reports themselves: it
divides every one of them.
"""

from __future__ import annotations

from math import gcd
from typing import Final

from preble.core.types import CacheDrift

_DIFFERENT_REPORTS: Final = 3
"""How many different reports it takes to learn the block size: prompts of one length have a larger divisor."""

_LARGEST_BLOCK: Final = 256


class HitReports:
    """The `cached_tokens` of one replica's answers. `drift`: expected and reported tokens, in all.

    `block_size`: tokens a block, as learned; before that, `block_size` as given.
    """

    __slots__ = ("_different", "_divisor", "_num_requests", "_predicted_tokens", "_reported_tokens", "block_size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._num_requests = self._predicted_tokens = self._reported_tokens = 0
        self._divisor = 0
        self._different: set[int] = set()

    def add(self, expected_tokens: int, cached_tokens: int) -> None:
        """Count one answer."""
        self._num_requests += 1
        self._predicted_tokens += expected_tokens
        self._reported_tokens += cached_tokens

    @property
    def drift(self) -> CacheDrift:
        return CacheDrift(self._predicted_tokens, self._reported_tokens, self._num_requests)

    def learn_block_size(self, cached_tokens: int) -> None:
        """Take one report into account: `block_size` becomes the largest power of two that divides all reports.

        >>> reports = HitReports(block_size=16)
        >>> for cached_tokens in (960, 320, 1088):
        ...     reports.learn_block_size(cached_tokens)
        >>> reports.block_size
        64
        """
        if cached_tokens <= 0:
            return
        self._divisor = gcd(self._divisor, cached_tokens)
        if len(self._different) < _DIFFERENT_REPORTS:
            self._different.add(cached_tokens)
        if len(self._different) == _DIFFERENT_REPORTS:
            self.block_size = min(self._divisor & -self._divisor, _LARGEST_BLOCK)

    def is_loss(self, expected_tokens: int, cached_tokens: int) -> bool:
        """Return whether the replica has lost a part of what was expected: more than a block is missing."""
        return expected_tokens - cached_tokens > self.block_size
