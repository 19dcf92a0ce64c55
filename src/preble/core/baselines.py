"""Simple rules to compare with, each on the same bookkeeping as E2."""

from __future__ import annotations

from random import Random

from preble.core.peers.scoring import choose_lowest
from preble.core.policy import Choice, ClusterView, lowest, unweighed
from preble.core.types import Reason


class RoundRobin:
    """Each replica in turn, whatever the prompt."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last: int = -1

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        del rng
        self._last = next((slot for slot in view.slots if slot > self._last), view.slots[0])
        return unweighed(view, self._last)


class LeastLoad:
    """The replica with the fewest outstanding tokens: prompt tokens to compute, and output tokens to expect."""

    name = "least_load"

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        tokens = [
            view.waiting_prefill_tokens[slot] + view.num_requests[slot] * view.mean_output_tokens[slot]
            for slot in view.slots
        ]
        return unweighed(view, lowest(view.slots, tokens, rng))


class RandomChoice:
    """Any replica, each as likely as the others."""

    name = "random"

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        return unweighed(view, rng.choice(view.slots))


class PowerOfTwo:
    """Of two replicas drawn at random, the one with fewer requests in flight."""

    name = "power_of_two"

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        return two_choices(view, rng, Reason.POLICY)


def two_choices(view: ClusterView, rng: Random, reason: Reason) -> Choice:
    """Of two replicas drawn at random, or of the only one, the one with fewer requests in flight; ties at random."""
    slots = rng.sample(view.slots, min(2, len(view.slots)))
    return choose_lowest(view, slots, [view.num_requests[slot] for slot in slots], rng, reason)
