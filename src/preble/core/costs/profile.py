"""How long a replica takes, as data.

It is never compiled, so it has a file of its own: profiles are read from files, and a compiled class does not keep the
types of a tuple's members, which the reader needs (docs/decisions/0005).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from preble.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CostProfile:
    """How long one replica takes, as fitted from measurements.

    `prefill_points`: (new tokens, seconds) of one prompt computed from nothing, in one iteration; strictly increasing
    tokens, non-decreasing seconds, first point at 0 tokens; linear between the points, and beyond the last one with the
    slope of the last piece.
    `attention_s_per_pair`, `attention_s_per_context_token`: extra seconds per (new token x token before it that is
    cached) and per such cached token, for a chunk of a prompt whose head is cached.
    `decode_base_s`, `decode_s_per_sequence`, `decode_s_per_context_token`: one decode iteration takes
    base + sequences x per_sequence + their total context x per_context_token, and at least what the same number of
    prefill tokens takes.
    `request_overhead_s`: seconds that a request adds to the iteration that admits it, beyond its tokens: work that the
    replica does for each request.
    `kv_capacity_tokens`: KV cache of one replica. `typical_batch`: sequences that share a decode iteration in service;
    one request is charged this part of an iteration.
    `host_load_s_per_token`, `store_load_s_per_token`: seconds to load the KV of a token from the host's memory, or from
    a store; None for a tenth, or half, of what it takes to compute one.
    `kv_bytes_per_token`: KV of one token in all layers. `link_bytes_per_s`, `link_latency_s`: how fast one replica
    sends KV to another, and what a transfer takes beside that. Replicas send each other nothing where one of the first
    two is None.
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
    attention_s_per_context_token: float = 0.0
    request_overhead_s: float = 0.0
    host_load_s_per_token: float | None = None
    store_load_s_per_token: float | None = None
    kv_bytes_per_token: int | None = None
    link_bytes_per_s: float | None = None
    link_latency_s: float = 0.005

    def __post_init__(self) -> None:
        points = self.prefill_points
        if len(points) < 2 or points[0][0] != 0:
            raise ConfigError(f"profile {self.name!r}: prefill_points needs at least two points, the first at 0 tokens")
        for (n0, s0), (n1, s1) in pairwise(points):
            if n1 <= n0 or s1 < s0:
                raise ConfigError(
                    f"profile {self.name!r}: prefill_points must grow: ({n0}, {s0}) is followed by ({n1}, {s1})"
                )
        coefficients = (
            points[0][1],
            self.attention_s_per_pair,
            self.attention_s_per_context_token,
            self.decode_base_s,
            self.decode_s_per_sequence,
            self.decode_s_per_context_token,
            self.request_overhead_s,
            self.host_load_s_per_token or 0.0,
            self.store_load_s_per_token or 0.0,
            self.link_latency_s,
        )
        if min(coefficients) < 0:
            raise ConfigError(f"profile {self.name!r}: no time may be negative, got {min(coefficients)}")
        if self.kv_capacity_tokens < 1 or self.typical_batch < 1:
            raise ConfigError(f"profile {self.name!r}: kv_capacity_tokens and typical_batch must be at least 1")
        for name in ("kv_bytes_per_token", "link_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"profile {self.name!r}: {name} must be above 0, got {value}")
