"""Simple rules to compare with, on the same counts and the same index as all policies."""

from __future__ import annotations

from random import Random

from preble.core.policies.cost_table import lowest
from preble.core.policies.scoring import two_choices, unweighed
from preble.core.policies.view import Choice, ClusterView
from preble.core.replica_index import ReplicaIndex
from preble.core.types import Reason


class RoundRobin:
    """Each replica in turn, whatever the prompt."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last = ReplicaIndex(-1)

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        del rng
        self._last = next((replica for replica in view.replicas if replica > self._last), view.replicas[0])
        return unweighed(view, self._last)


class LeastLoad:
    """The replica with the fewest outstanding tokens: prompt tokens to compute plus output tokens to expect."""

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
