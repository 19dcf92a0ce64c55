"""E2: exploit a cached prefix or explore a replica (Algorithm 1), by load cost L + M + P (Algorithm 2).

Source: Preble, "Per-request scheduling policy". Where the paper is silent: docs/decisions/0001.
"""

from __future__ import annotations

from random import Random

from preble.core.policy import Choice, ClusterView, lowest
from preble.core.types import Reason


class E2:
    """The paper's per-request policy. Stateless."""

    name = "e2"

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """Exploit if less of the prompt is missing than cached somewhere, else explore every replica.

        O(depth + holders of the key portion + victims) to exploit, O(replicas) to explore.
        """
        missed_tokens = view.request.num_prompt_tokens - view.cached_tokens
        if missed_tokens < view.cached_tokens:
            return cheapest(view, view.key_holders, Reason.EXPLOIT, rng)
        return cheapest(view, view.slots, Reason.EXPLORE, rng)


def cheapest(view: ClusterView, slots: list[int], reason: Reason, rng: Random) -> Choice:
    """The replica of `slots` with the lowest load cost; ties at random."""
    matched = view.matched_tokens if len(slots) > 1 else None
    candidates = [view.cost(s, view.matched_on(s) if matched is None else int(matched[s])) for s in slots]
    slot = lowest(slots, (candidate.cost_s for candidate in candidates), rng)
    return Choice(slot, reason, tuple(candidates))
