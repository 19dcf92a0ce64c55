"""LMetric's rule: one product."""

from __future__ import annotations

from random import Random

from preble.core.policies.scoring import choose_lowest, uncached_tokens
from preble.core.policies.view import Choice, ClusterView


class LMetric:
    """LMetric: the least (prompt tokens not cached there) x (requests in flight there + 1). No knobs.

    Source: "LMetric: Simple is Better", arXiv 2603.15202. The 1 is the request itself, as in the routers that use this
    rule: without it all idle replicas would be equal, cached or not. Theirs reads the batch size from the engine.
    """

    name = "lmetric"

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """O(replicas + depth)."""
        replicas = view.replicas
        uncached = uncached_tokens(view, replicas)
        products = [
            tokens * (view.num_requests[replica] + 1) for replica, tokens in zip(replicas, uncached, strict=True)
        ]
        return choose_lowest(view, replicas, products, rng)
