"""What the peers' rules have in common: a score for each replica, and the lowest wins."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from preble.core.policies.policy import Choice, ClusterView, lowest
from preble.core.types import Candidate, Reason


def scored(view: ClusterView, replicas: Sequence[int], scores: Sequence[float]) -> tuple[Candidate, ...]:
    """These replicas as candidates, each with its score."""
    rows = zip(replicas, view.matched_tokens(replicas), scores, strict=True)
    return tuple(Candidate(view.replica_id(replica), matched, score=score) for replica, matched, score in rows)


def choose_lowest(
    view: ClusterView, replicas: Sequence[int], scores: Sequence[float], rng: Random, reason: Reason = Reason.POLICY
) -> Choice:
    """The replica with the lowest score, ties at random; all of `replicas` are its candidates."""
    return Choice(lowest(replicas, scores, rng), reason, scored(view, replicas, scores))


def match_ratio(view: ClusterView, matched_tokens: int) -> float:
    """Part of the prompt that so many tokens are; 0 for an empty prompt."""
    return matched_tokens / max(view.request.num_prompt_tokens, 1)


def in_flight(view: ClusterView, replicas: Sequence[int]) -> list[int]:
    """Requests in flight on each of these replicas."""
    return [view.num_requests[replica] for replica in replicas]


def uncached_tokens(view: ClusterView, replicas: Sequence[int]) -> list[int]:
    """Prompt tokens that each of these replicas would have to compute."""
    return [view.request.num_prompt_tokens - matched for matched in view.matched_tokens(replicas)]
