"""What policies have in common: a score for each replica, and the lowest wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from preble.core.policies.cost_table import lowest
from preble.core.policies.view import Choice, ClusterView, ReplicaView
from preble.core.replica_index import ReplicaIndex
from preble.core.types import Candidate, Reason


def choose_by(
    view: ClusterView, score: Callable[[ReplicaView], float], rng: Random, reason: Reason = Reason.POLICY
) -> Choice:
    """Return the candidate with the lowest score, ties at random. The scores go into the decision log."""
    return choose_lowest(view, view.replicas, [score(replica) for replica in view.candidates], rng, reason)


def unweighed(view: ClusterView, replica: ReplicaIndex) -> Choice:
    """Return a choice for which no costs were weighed; its only candidate says what the replica has cached."""
    return Choice(replica, Reason.POLICY, (Candidate(view.replica_id(replica), view.matched_on(replica)),))


def scored(view: ClusterView, replicas: Sequence[ReplicaIndex], scores: Sequence[float]) -> tuple[Candidate, ...]:
    """Return these replicas as candidates, each with its score."""
    rows = zip(replicas, view.matched_tokens(replicas), scores, strict=True)
    return tuple(Candidate(view.replica_id(replica), matched, score=score) for replica, matched, score in rows)


def choose_lowest(
    view: ClusterView,
    replicas: Sequence[ReplicaIndex],
    scores: Sequence[float],
    rng: Random,
    reason: Reason = Reason.POLICY,
) -> Choice:
    """Return the replica with the lowest score, ties at random; all of `replicas` are its candidates."""
    return Choice(lowest(replicas, scores, rng), reason, scored(view, replicas, scores))


def match_ratio(view: ClusterView, matched_tokens: int) -> float:
    """Return the part of the prompt that `matched_tokens` are; 0 for an empty prompt."""
    return matched_tokens / max(view.request.num_prompt_tokens, 1)


def in_flight(view: ClusterView, replicas: Sequence[ReplicaIndex]) -> list[int]:
    """Return requests in flight on each of these replicas."""
    return [view.num_requests[replica] for replica in replicas]


def uncached_tokens(view: ClusterView, replicas: Sequence[ReplicaIndex]) -> list[int]:
    """Return prompt tokens that each of these replicas would have to compute."""
    return [view.request.num_prompt_tokens - matched for matched in view.matched_tokens(replicas)]


def two_choices(view: ClusterView, rng: Random, reason: Reason) -> Choice:
    """Draw two replicas at random and return the one with fewer requests in flight, or the only one; ties at
    random.
    """
    replicas = rng.sample(view.replicas, min(2, len(view.replicas)))
    return choose_lowest(view, replicas, [view.num_requests[replica] for replica in replicas], rng, reason)
