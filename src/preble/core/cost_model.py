"""Tokens to seconds of GPU time: the only home of coefficients.

A `CostProfile` is data (measured per GPU and model, shipped or made by `preble profile`); a `CostModel` answers
questions about it. Every function is monotone and never negative.
Source: Preble, appendix "Prefill/Decoding Times"; how decode is charged is decided in docs/decisions/0002.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from preble.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CostProfile:
    """How long one replica takes, as fitted from measurements.

    `prefill_points`: (new tokens, seconds) of one prompt computed from nothing, in one iteration; strictly increasing
    tokens, non-decreasing seconds, first point at 0 tokens; linear between the points, and beyond the last one with the
    slope of the last piece.
    `attention_s_per_pair`: extra seconds per (new token x cached context token), for a prompt whose head is cached.
    `decode_base_s`, `decode_s_per_sequence`, `decode_s_per_context_token`: one decode iteration takes
    base + sequences x per_sequence + their total context x per_context_token.
    `kv_capacity_tokens`: KV cache of one replica. `typical_batch`: sequences that share a decode iteration in service;
    it decides which part of an iteration is charged to one request.
    """

    name: str
    source: str
    prefill_points: tuple[tuple[int, float], ...]
    attention_s_per_pair: float
    decode_base_s: float
    decode_s_per_sequence: float
    decode_s_per_context_token: float
    kv_capacity_tokens: int
    typical_batch: int = 16

    def __post_init__(self) -> None:
        points = self.prefill_points
        if len(points) < 2 or points[0][0] != 0:
            raise ConfigError(f"profile {self.name!r}: prefill_points needs at least two points, the first at 0 tokens")
        for (n0, s0), (n1, s1) in zip(points, points[1:], strict=False):
            if n1 <= n0 or s1 < s0:
                raise ConfigError(
                    f"profile {self.name!r}: prefill_points must grow: ({n0}, {s0}) is followed by ({n1}, {s1})"
                )
        coefficients = (
            points[0][1],
            self.attention_s_per_pair,
            self.decode_base_s,
            self.decode_s_per_sequence,
            self.decode_s_per_context_token,
        )
        if min(coefficients) < 0:
            raise ConfigError(f"profile {self.name!r}: no time may be negative, got {min(coefficients)}")
        if self.kv_capacity_tokens < 1 or self.typical_batch < 1:
            raise ConfigError(f"profile {self.name!r}: kv_capacity_tokens and typical_batch must be at least 1")


class CostModel:
    """Answers in seconds of GPU time from one profile. Immutable; O(log points) a question."""

    __slots__ = ("_seconds", "_slopes", "_tokens", "profile")

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        points = profile.prefill_points
        self._tokens = [n for n, _ in points]
        self._seconds = [s for _, s in points]
        self._slopes = [(s1 - s0) / (n1 - n0) for (n0, s0), (n1, s1) in zip(points, points[1:], strict=False)]

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds to compute `new_tokens` that follow `cached_tokens` already in the cache. 0.0 for no new token.

        Non-decreasing in both arguments.
        """
        if new_tokens <= 0:
            return 0.0
        i = min(bisect_right(self._tokens, new_tokens), len(self._slopes)) - 1
        alone = self._seconds[i] + (new_tokens - self._tokens[i]) * self._slopes[i]
        return alone + self.profile.attention_s_per_pair * new_tokens * cached_tokens

    def decode_s(self, output_tokens: float, context_tokens: float = 0.0) -> float:
        """Seconds of GPU time that one request's decoding takes, in iterations shared by `typical_batch` sequences."""
        if output_tokens <= 0:
            return 0.0
        p = self.profile
        per_token = p.decode_base_s / p.typical_batch + p.decode_s_per_sequence
        return output_tokens * (per_token + p.decode_s_per_context_token * context_tokens)

    def iteration_s(self, prefills: Sequence[tuple[int, int]], num_decodes: int, decode_context_tokens: int) -> float:
        """Seconds of one iteration that mixes prefill chunks with decodes.

        `prefills`: (new tokens, tokens before them) of each chunk; `decode_context_tokens`: context of all decoding
        sequences together. A mixed iteration costs its prefill part and the marginal part of its decodes; the fixed
        part of a decode iteration is paid only where it exceeds the prefill's.
        """
        p = self.profile
        new_tokens = sum(n for n, _ in prefills)
        prefill = self.prefill_s(new_tokens)
        prefill += p.attention_s_per_pair * sum(n * before for n, before in prefills)
        if not num_decodes:
            return prefill
        marginal = num_decodes * p.decode_s_per_sequence + decode_context_tokens * p.decode_s_per_context_token
        return max(prefill, p.decode_base_s) + marginal
