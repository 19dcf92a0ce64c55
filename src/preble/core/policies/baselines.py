"""Simple rules to compare with, each on the same bookkeeping as E2."""

from __future__ import annotations

from random import Random

from preble.core.policies.peers.scoring import choose_lowest
from preble.core.policies.policy import Choice, ClusterView, lowest, unweighed
from preble.core.types import Reason


class RoundRobin:
    """Each replica in turn, whatever the prompt."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last: int = -1

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        del rng
        self._last = next((replica for replica in view.replicas if replica > self._last), view.replicas[0])
        return unweighed(view, self._last)


class LeastLoad:
    """The replica with the fewest outstanding tokens: prompt tokens to compute, and output tokens to expect."""

    name = "least_load"

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        tokens = [
            view.waiting_prefill_tokens[replica] + view.num_requests[replica] * view.mean_output_tokens[replica]
            for replica in view.replicas
        ]
        return unweighed(view, lowest(view.replicas, tokens, rng))


class RandomChoice:
    """Any replica, each as likely as the others."""

    name = "random"

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        return unweighed(view, rng.choice(view.replicas))


class PowerOfTwo:
    """Of two replicas drawn at random, the one with fewer requests in flight."""

    name = "power_of_two"

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        return two_choices(view, rng, Reason.POLICY)


def two_choices(view: ClusterView, rng: Random, reason: Reason) -> Choice:
    """Of two replicas drawn at random, or of the only one, the one with fewer requests in flight; ties at random."""
    replicas = rng.sample(view.replicas, min(2, len(view.replicas)))
    return choose_lowest(view, replicas, [view.num_requests[replica] for replica in replicas], rng, reason)
