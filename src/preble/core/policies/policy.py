"""What a placement policy is.

A policy chooses from a read-only `ClusterView`; all bookkeeping stays in `GlobalScheduler`, so that every policy is
compared on equal terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from preble.core.policies.view import ClusterView
from preble.core.replica_index import ReplicaIndex
from preble.core.types import Candidate, Reason
from preble.errors import PolicyError


class Choice:
    """A policy's decision.

    `candidates`: what it weighed, for logs and explanations. `prefix_tokens`: the length of the prefix because of which
    it chose the replica, 0 if there is none; the rebalancer watches how long that prefix's requests queue, and may
    replicate it.
    """

    __slots__ = ("candidates", "prefix_tokens", "reason", "replica")

    def __init__(
        self, replica: ReplicaIndex, reason: Reason, candidates: Sequence[Candidate] = (), prefix_tokens: int = 0
    ) -> None:
        self.replica = replica
        self.reason = reason
        self.candidates = candidates
        self.prefix_tokens = prefix_tokens


class Policy(Protocol):
    """One rule of placement. It may keep state of its own, and must not change the view.

    It must decide by the view and `rng` alone, with no clock and no randomness of its own: then decision logs replay.
    """

    @property
    def name(self) -> str: ...

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """Choose a replica for `view.request`, one of `view.replicas`. `rng` breaks ties."""
        ...


def failure_of(policy: Policy, error: Exception) -> PolicyError:
    """Return `error`, raised by `policy.choose`, as one that names the last line of the policy's package that ran."""
    package = type(policy).__module__.partition(".")[0]
    where, frame = "", error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] == package:
            where = f" in {frame.tb_frame.f_code.co_filename}, line {frame.tb_lineno}"
        frame = frame.tb_next
    return PolicyError(f"policy {policy.name!r} failed{where}: {type(error).__name__}: {error}")
