"""Ending a run as soon as it is clear what it says."""

from __future__ import annotations

from dataclasses import dataclass

from preble.lab.compare.plan import Cell
from preble.lab.metrics.capacity import CapacitySlo
from preble.lab.metrics.steady import Verdict, steadiness
from preble.lab.sim.watch import Glimpse, Watch

LOOKS_PER_WINDOW = 6
SETTLED_WINDOWS = 2
"""The least length of a settled run, in windows of the policy: what a window forgets shows in the second."""
PATIENCE = 5.0
"""A queue that takes this many times the SLO's bound to serve is no transient."""
EASE = 0.5
"""A part of the SLO's bound; what stays below it keeps the SLO with ease."""


def watch_of(cell: Cell) -> Watch | None:
    """Return what may end the run of a cell; None for a run to the end."""
    if cell.slo is None or not cell.workload.rps:
        return None
    return _Enough(
        cell.slo, cell.workload.rps, cell.config.window_s, cell.warm_s, may_settle=cell.first_event_s is None
    )


@dataclass(frozen=True, slots=True)
class _Enough:
    """Ends a run that is overloaded beyond doubt, or that has settled and keeps the SLO with ease.

    `may_settle`: False where something is still to happen.
    """

    slo: CapacitySlo
    rps: float
    window_s: float
    warm_s: float
    may_settle: bool

    @property
    def every_s(self) -> float:
        return self.window_s / LOOKS_PER_WINDOW

    def has_seen_enough(self, glimpse: Glimpse) -> bool:
        bound_s = max(self.slo.ttft_p99_s or 0.0, self.slo.e2e_mean_s or 0.0)
        if glimpse.now <= self.warm_s:
            return False
        # By Little's law, a request that arrives now waits about this long.
        if glimpse.num_waiting / self.rps > PATIENCE * bound_s:
            return True
        is_long = self.may_settle and glimpse.now - self.warm_s >= SETTLED_WINDOWS * self.window_s
        return is_long and self._has_settled(glimpse)

    def _has_settled(self, glimpse: Glimpse) -> bool:
        records = [record for record in glimpse.records if self.warm_s <= record.scheduled_s < glimpse.oldest_s]
        if not records:
            return False
        found = steadiness(records, until_s=glimpse.oldest_s, least_s=self.window_s)
        pairs = list(self.slo.of(found.summary))
        return found.verdict is Verdict.STEADY and all(value <= EASE * bound for value, bound in pairs)
