"""The rule of AIBrix's gateway that is named after Preble."""

from __future__ import annotations

from random import Random

from preble.core.policies.scoring import choose_lowest, match_ratio
from preble.core.policies.view import Choice, ClusterView
from preble.core.types import Reason


class AibrixPreble:
    """AIBrix's prefix-cache-preble: exploit or explore, with the load term alone.

    If the longest match is more than `match_threshold` of the prompt, of the replicas with that match the one with the
    fewest requests in the window; else the one with the least L of all, in seconds: the window's prefills of what was
    missed, and its decodes.

    Default: `match_threshold` 0.5 of the prompt. Source: AIBrix 2026, prefix-cache-preble.
    Lacks E2's M and P, rebalancing, replication, prefill/decode balance. Theirs keeps the window per tree node: the
    requests of a node count for each replica that caches it, and its missed prefill time is split evenly between them;
    here each request counts where it was placed. Theirs assumes a V100 and 45 output tokens of 0.15 s for each
    node; here the cost profile and the output lengths seen decide.
    """

    name = "aibrix_preble"

    def __init__(self, *, match_threshold: float = 0.5) -> None:
        self._match_threshold = match_threshold

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """O(replicas + depth)."""
        replicas, matched = view.replicas, view.matched_tokens(view.replicas)
        best = max(matched)
        if match_ratio(view, best) > self._match_threshold:
            holders = [replica for replica, tokens in zip(replicas, matched, strict=True) if tokens == best]
            requests = [view.num_window_requests[replica] for replica in holders]
            return choose_lowest(view, holders, requests, rng, Reason.EXPLOIT)
        return choose_lowest(view, replicas, [view.load_s[replica] for replica in replicas], rng, Reason.EXPLORE)
