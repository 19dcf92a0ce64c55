"""The rule of NVIDIA Dynamo's KV router."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from random import Random

from preble.core.policies.scoring import choose_lowest, scored, uncached_tokens
from preble.core.policies.view import Choice, ClusterView
from preble.core.replica_index import ReplicaIndex
from preble.core.types import Reason


class DynamoKv:
    """NVIDIA Dynamo's KV router: the least work to come, in KV blocks, as it would be with the request.

    cost = `overlap_weight` x (prompt tokens still to be computed there + those of the request not cached there)
    / `block_size` + (tokens in use there, the request's own included) / `block_size`. The lowest cost; with a
    `temperature` a softmax draw instead, P ~ exp(-cost / (max cost - min cost) / `temperature`).

    Defaults: `block_size` 16 tokens (theirs is the engine's, 16 to 64), `overlap_weight` 1, `temperature` 0 (no draw).
    Source: NVIDIA Dynamo 2026, KV router.
    Theirs rounds to blocks and can count output blocks as they come; here blocks are fractional and prompts only.
    """

    name = "dynamo_kv"

    def __init__(self, *, block_size: int = 16, overlap_weight: float = 1.0, temperature: float = 0.0) -> None:
        self._block_size = block_size
        self._overlap_weight = overlap_weight
        self._temperature = temperature

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """O(replicas x depth)."""
        replicas = view.replicas
        costs = [
            (self._overlap_weight * (view.waiting_prefill_tokens[replica] + uncached) + view.active_tokens(replica))
            / self._block_size
            for replica, uncached in zip(replicas, uncached_tokens(view, replicas), strict=True)
        ]
        if self._temperature > 0:
            return Choice(self._draw(replicas, costs, rng), Reason.POLICY, scored(view, replicas, costs))
        return choose_lowest(view, replicas, costs, rng)

    def _draw(self, replicas: Sequence[ReplicaIndex], costs: Sequence[float], rng: Random) -> ReplicaIndex:
        scale = (max(costs) - min(costs)) * self._temperature or 1.0
        return rng.choices(replicas, [exp((min(costs) - cost) / scale) for cost in costs])[0]
