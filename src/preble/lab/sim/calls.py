"""Requests of a simulation that were sent and have not ended."""

from __future__ import annotations

from dataclasses import dataclass

from preble.core.types import PackedTokens, Placement, Request
from preble.lab.sim.replica import SimReplica
from preble.lab.workloads import WorkloadRequest

REPLICA_LOST, NO_REPLICA, PROMPT_TOO_LONG, PARENT_FAILED, REFUSED = (
    "replica lost",
    "no replica",
    "prompt too long",
    "parent failed",
    "refused",
)
"""The errors of a record."""


@dataclass(slots=True)
class Call:
    """A request that was sent and has not ended. `replica`: where it was placed last, None before that.

    `leg`: the replica that computes its prompt for that one; `leg_cached`: tokens of it that it had cached.
    """

    asked: WorkloadRequest
    request: Request
    answer: PackedTokens
    scheduled_s: float
    replica: SimReplica | None = None
    placement: Placement | None = None
    delivered: bool = False
    first_token_s: float | None = None
    has_moved: bool = False
    leg: SimReplica | None = None
    leg_cached: int | None = None
