"""The simulated replicas, and their iterations on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from preble.core.replica.scheduler import StepResult
from preble.core.types import ReplicaId
from preble.lab.sim.agenda import Agenda, Priority
from preble.lab.sim.replica import SimReplica


class SimFleet:
    """`live`: the replicas that are there now; `all`: those that are lost, too, in the order in which they joined.

    `on_iteration` is given each iteration that ends, its replica and the time.
    """

    def __init__(self, agenda: Agenda, on_iteration: Callable[[SimReplica, StepResult, float], None]) -> None:
        self.live: dict[ReplicaId, SimReplica] = {}
        self.all: list[SimReplica] = []
        self._agenda = agenda
        self._on_iteration = on_iteration

    def add(self, replica: SimReplica) -> None:
        self.live[replica.replica_id] = replica
        self.all.append(replica)

    def lose(self, replica_id: ReplicaId, now: float) -> None:
        """Take a replica out, with all that runs on it."""
        self.live.pop(replica_id).lose(now)

    def wake(self, replica: SimReplica, now: float) -> None:
        """Begin an iteration unless one runs: the replica has got something to do."""
        if not replica.is_awake:
            replica.is_awake = True
            self._agenda.at(now, Priority.ITERATION_START, partial(self._begin_iteration, replica))

    def _begin_iteration(self, replica: SimReplica, now: float) -> None:
        if not replica.is_alive:
            return
        seconds = replica.begin_iteration(now)
        replica.is_awake = seconds is not None
        if seconds is not None:
            self._agenda.at(now + seconds, Priority.ITERATION_END, partial(self._end_iteration, replica))

    def _end_iteration(self, replica: SimReplica, now: float) -> None:
        if not replica.is_alive:
            return
        self._on_iteration(replica, replica.end_iteration(now), now)
        self._agenda.at_once(now, Priority.ITERATION_START, partial(self._begin_iteration, replica))
