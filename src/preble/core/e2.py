"""E2: exploit a cached prefix or explore a replica (Algorithm 1), by load cost L + M + P (Algorithm 2).

Source: Preble, "Per-request scheduling policy". Where the paper is silent: docs/decisions/0001.
"""

from __future__ import annotations

from random import Random

from preble.core.policy import Choice, ClusterView
from preble.core.types import Reason


class E2:
    """The paper's per-request policy. Stateless."""

    name = "e2"

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """Exploit if less of the prompt is missing than cached somewhere, else explore every replica.

        O(depth + holders of the key portion + victims) to exploit, O(replicas) to explore.
        """
        missed_tokens = view.request.num_prompt_tokens - view.cached_tokens
        exploit = missed_tokens < view.cached_tokens
        costs = view.costs(view.key_holders if exploit else view.slots)
        return Choice(costs.cheapest(rng), Reason.EXPLOIT if exploit else Reason.EXPLORE, costs)
