"""The rule of Ray Serve LLM's prefix-aware router."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from preble.core.policies.scoring import choose_lowest, in_flight, match_ratio, two_choices
from preble.core.policies.view import Choice, ClusterView
from preble.core.replica_index import ReplicaIndex
from preble.core.types import Reason


class RayPrefix:
    """Ray Serve LLM's PrefixCacheAffinityRouter: follow the longest match while queues are even.

    With q = requests in flight: if max q - min q > `imbalanced_threshold`, power of two. Else the least q of the
    replicas with the longest match; if that match is less than `match_rate_threshold` of the prompt, of those that
    cache the fewest tokens.

    Defaults: `imbalanced_threshold` 10 requests (Ray has had 10 and infinity, which never balances),
    `match_rate_threshold` 0.1 of the prompt. Source: Ray Serve LLM 2026.
    Theirs matches characters in a tree that does not shrink when engines evict.
    """

    name = "ray_prefix"

    def __init__(self, *, imbalanced_threshold: float = 10.0, match_rate_threshold: float = 0.1) -> None:
        self._imbalanced_threshold = imbalanced_threshold
        self._match_rate_threshold = match_rate_threshold

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """O(replicas + depth)."""
        replicas = view.replicas
        load = in_flight(view, replicas)
        if max(load) - min(load) > self._imbalanced_threshold:
            return two_choices(view, rng, Reason.BALANCE)
        matched = view.matched_tokens(replicas)
        if match_ratio(view, max(matched)) < self._match_rate_threshold:
            held = [view.held_tokens(replica) for replica in replicas]
            return self._least_busy(view, _where(replicas, held, min(held)), rng, Reason.EXPLORE)
        return self._least_busy(view, _where(replicas, matched, max(matched)), rng, Reason.EXPLOIT)

    def _least_busy(self, view: ClusterView, replicas: list[ReplicaIndex], rng: Random, reason: Reason) -> Choice:
        return choose_lowest(view, replicas, in_flight(view, replicas), rng, reason)


def _where(replicas: Sequence[ReplicaIndex], values: Sequence[int], wanted: int) -> list[ReplicaIndex]:
    return [replica for replica, value in zip(replicas, values, strict=True) if value == wanted]
