"""What a placement policy is.

A policy chooses from a read-only `ClusterView`; the bookkeeping that all need stays in `GlobalScheduler`, so that every
policy is compared on equal terms. What one alone needs is its own: see `Watching`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from random import Random
from typing import Final, Protocol

from preble.core.cluster.state import ClusterState
from preble.core.policies.view import Choice, ClusterView
from preble.core.types import PrefixReplication
from preble.core.types.events import SchedulerEvent
from preble.errors import PolicyError


class Policy(Protocol):
    """One rule of placement. It may keep state of its own, and must not change the view.

    It must decide by the view and `rng` alone, with no clock and no randomness of its own: then decision logs replay.
    """

    @property
    def name(self) -> str: ...

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """Choose a replica for `view.request`, one of `view.replicas`. `rng` breaks ties."""
        ...


TTFT_WEIGHT: Final = 3.0
"""By how much more a second before the first token counts than one of decoding, where a policy does not say it."""


def ttft_value(policy: Policy) -> float:
    """Return v: what a second before the first token counts, by the policy's own `ttft_value` if it has one."""
    return float(getattr(policy, "ttft_value", 1.0 + TTFT_WEIGHT))


class Watching(ABC):
    """A policy with books of its own: it also hears of everything that changes its scheduler, and has a timer.

    `num_replicated`: prefixes that it serves from replicas of its own choice.
    """

    @property
    @abstractmethod
    def num_replicated(self) -> int:
        """See above."""

    @abstractmethod
    def watch(self, cluster: ClusterState) -> None:
        """The policy's scheduler begins, with this cluster, of which it must change nothing. Called once, first."""

    @abstractmethod
    def on(self, event: SchedulerEvent, now: float) -> None:
        """See `SchedulerListener`. A request's own event comes before those of other listeners."""

    @abstractmethod
    def next_timer(self) -> float | None:
        """Return when `on_timer` has something to do next; None if nothing is pending."""

    @abstractmethod
    def on_timer(self, now: float) -> list[PrefixReplication]:
        """Do what is due. Return the prefixes that were replicated or retired, to be reported."""


def failure_of(policy: Policy, error: Exception) -> PolicyError:
    """Return `error`, raised by `policy.choose`, as one that names the last line of the policy's package that ran."""
    package = type(policy).__module__.partition(".")[0]
    where, frame = "", error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] == package:
            where = f" in {frame.tb_frame.f_code.co_filename}, line {frame.tb_lineno}"
        frame = frame.tb_next
    return PolicyError(f"policy {policy.name!r} failed{where}: {type(error).__name__}: {error}")
