"""From tokens to seconds of GPU time. No other module has coefficients.

A `CostProfile` is data: measured for one GPU and model, shipped or made by `preble profile`. A `CostModel` answers
questions about it. Every function is monotone and never negative.
Source: Preble, appendix "Prefill/Decoding Times"; how decode is charged is decided in docs/decisions/0002.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Final

from preble.core.costs.profile import CostProfile
from preble.core.types import Tier

__all__ = ["CostModel", "CostProfile"]

_LOOKUP_BITS: Final = 8
"""Pieces of the curve are looked up in a table of at most 2 to this power."""

_HOST_LOAD: Final = 0.1
_STORE_LOAD: Final = 0.5
"""What loading a token takes of the time to compute it, where the profile does not say."""


class CostModel:
    """Answers in seconds of GPU time from one profile. Immutable; O(log points) a question."""

    __slots__ = (
        "_decode_base_s",
        "_decode_s_per_context_token",
        "_decode_s_per_sequence",
        "_decode_step_s",
        "_first_piece",
        "_s_per_context_token",
        "_s_per_pair",
        "_seconds",
        "_shift",
        "_slopes",
        "_tokens",
        "profile",
    )

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        points = profile.prefill_points
        self._tokens = [n for n, _ in points]
        self._seconds = [s for _, s in points]
        self._slopes = [(s1 - s0) / (n1 - n0) for (n0, s0), (n1, s1) in pairwise(points)]
        self._shift = max(self._tokens[-1].bit_length() - _LOOKUP_BITS, 0)
        starts = range(0, self._tokens[-1], 1 << self._shift)
        self._first_piece = [bisect_right(self._tokens, num_tokens) - 1 for num_tokens in starts]
        self._s_per_pair = profile.attention_s_per_pair
        self._s_per_context_token = profile.attention_s_per_context_token
        self._decode_base_s = profile.decode_base_s
        self._decode_s_per_sequence = profile.decode_s_per_sequence
        self._decode_s_per_context_token = profile.decode_s_per_context_token
        self._decode_step_s = self.decode_iteration_s(profile.typical_batch, 0) / profile.typical_batch

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Return seconds to compute `new_tokens` that follow `cached_tokens` already in the cache. 0.0 for no new
        token.

        Non-decreasing in both arguments.
        """
        if new_tokens <= 0:
            return 0.0
        return self._alone_s(new_tokens) + self._context_s(new_tokens, cached_tokens)

    def decode_s(self, output_tokens: float, context_tokens: float = 0.0) -> float:
        """Return seconds of GPU time that one request's decoding takes, in iterations shared by `typical_batch`
        sequences.
        """
        if output_tokens <= 0:
            return 0.0
        return output_tokens * (self._decode_step_s + self._decode_s_per_context_token * context_tokens)

    def decode_sequence_s(self, context_tokens: float) -> float:
        """Return seconds that one more sequence with `context_tokens` of context adds to every decode iteration."""
        return self._decode_s_per_sequence + self._decode_s_per_context_token * context_tokens

    def decode_iteration_s(self, num_decodes: int, context_tokens: int) -> float:
        """Return seconds of one iteration of decodes alone, with `context_tokens` of context together."""
        return self._iteration_s(num_decodes, 0.0, num_decodes, context_tokens)

    def iteration_s(self, prefills: Sequence[tuple[int, int]], num_decodes: int, decode_context_tokens: int) -> float:
        """Return seconds of one iteration that mixes prefill chunks with decodes. Non-decreasing in everything.

        `prefills`: (new tokens, tokens before them) of each chunk; `decode_context_tokens`: context of all decoding
        sequences together. The tokens of chunks and decodes go through the linear layers together. The fixed
        part of a decode iteration counts only where it is larger than that. Attention is added for each sequence.
        """
        num_tokens, context_s = num_decodes, 0.0
        for new_tokens, tokens_before in prefills:
            num_tokens += new_tokens
            context_s += self._context_s(new_tokens, tokens_before)
        return self._iteration_s(num_tokens, context_s, num_decodes, decode_context_tokens)

    def _iteration_s(self, num_tokens: int, context_s: float, num_decodes: int, decode_context_tokens: int) -> float:
        if not num_tokens:
            return 0.0
        seconds = self._alone_s(num_tokens) + context_s
        if not num_decodes:
            return seconds
        decodes_s = num_decodes * self._decode_s_per_sequence
        decodes_s += decode_context_tokens * self._decode_s_per_context_token
        return max(seconds, self._decode_base_s) + decodes_s

    def standstill_s(self, new_tokens: int, cached_tokens: int, num_decodes: int) -> float:
        """Return seconds by which computing a prompt holds up those that decode. A few tokens hold up nobody: an
        iteration of decodes reads the model's weights anyway. For no decodes, the seconds to compute it.
        """
        seconds = self.iteration_s([(new_tokens, cached_tokens)], num_decodes, 0)
        return seconds - self.decode_iteration_s(num_decodes, 0)

    def load_s(self, tier: Tier, tokens: int) -> float:
        """Return seconds to load the KV of `tokens` from a tier."""
        if tier is Tier.HOST:
            rate, share = self.profile.host_load_s_per_token, _HOST_LOAD
        else:
            rate, share = self.profile.store_load_s_per_token, _STORE_LOAD
        return tokens * (self._slopes[-1] * share if rate is None else rate)

    def link_s(self, tokens: int) -> float:
        """Return seconds for which sending the KV of `tokens` to another replica keeps a link busy; infinity where the
        profile does not say how fast it is.
        """
        kv_bytes, rate = self.profile.kv_bytes_per_token, self.profile.link_bytes_per_s
        return inf if kv_bytes is None or rate is None else tokens * kv_bytes / rate

    @property
    def link_latency_s(self) -> float:
        """Seconds that a transfer takes beside the time on the link."""
        return self.profile.link_latency_s

    def balanced_decode_ratio(self) -> float:
        """Return the share of decoding in a replica's work that keeps both its memory and its compute busy: ImbalR.

        While an iteration of `typical_batch` decodes reads the model's weights, it can compute some prompt tokens for
        nothing. A replica with a larger share of decoding than that has compute to spare. 1.0 where there is none.
        """
        base_s, batch = self.profile.decode_base_s, self.profile.typical_batch
        i = bisect_right(self._seconds, base_s) - 1
        if not 0 <= i < len(self._slopes):
            return 1.0
        free_tokens = max(self._tokens[i] + (base_s - self._seconds[i]) / self._slopes[i] - batch, 0.0)
        step_s = self.decode_iteration_s(batch, 0)
        return step_s / (step_s + free_tokens * self._slopes[i]) if step_s else 1.0

    def admission_s(self, num_requests: int) -> float:
        """Return seconds that admitting `num_requests` adds to an iteration, beyond their tokens."""
        return num_requests * self.profile.request_overhead_s

    def _alone_s(self, num_tokens: int) -> float:
        i = self._piece(num_tokens)
        return self._seconds[i] + (num_tokens - self._tokens[i]) * self._slopes[i]

    def _piece(self, num_tokens: int) -> int:
        """Return the index of the piece of the curve that holds a number of tokens."""
        i = self._first_piece[min(num_tokens >> self._shift, len(self._first_piece) - 1)]
        while i + 1 < len(self._slopes) and self._tokens[i + 1] <= num_tokens:
            i += 1
        return i

    def _context_s(self, new_tokens: int, cached_tokens: int) -> float:
        if not cached_tokens:
            return 0.0
        return cached_tokens * (self._s_per_pair * new_tokens + self._s_per_context_token)
