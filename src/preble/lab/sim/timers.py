"""The timers of the simulated scheduler: it does what is due, each thing at its time."""

from __future__ import annotations

from math import inf

from preble.lab.sim.gateways import ClusterScheduler
from preble.lab.sim.result import ReplicationRecord


class Timers:
    """`replications`: what they did."""

    def __init__(self, scheduler: ClusterScheduler) -> None:
        self.replications: list[ReplicationRecord] = []
        self._scheduler = scheduler
        self._due_s = -inf
        """When the next timer is due; minus infinity while that is to be asked."""

    @property
    def scheduler(self) -> ClusterScheduler:
        """Return the scheduler for a call that may change when its timer is due."""
        self._due_s = -inf
        return self._scheduler

    def run(self, until_s: float) -> None:
        """Let the scheduler do what is due by `until_s`."""
        while (due_s := self._next()) <= until_s:
            for change in self.scheduler.on_timer(due_s):
                self.replications.append(
                    ReplicationRecord(due_s, change.prefix_tokens, change.replica_id, change.added, change.num_replicas)
                )

    def _next(self) -> float:
        if self._due_s == -inf:
            due_s = self._scheduler.next_timer()
            self._due_s = inf if due_s is None else due_s
        return self._due_s
