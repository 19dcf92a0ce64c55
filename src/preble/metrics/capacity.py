"""How much a cluster carries: the highest rate at which a run as a whole still keeps its bounds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum

import msgspec

from preble.metrics.summary import Summary


class CapacitySlo(msgspec.Struct, frozen=True):
    """Bounds in seconds that a whole run has to keep; None bounds nothing.

    The TTFT is bounded at its p99, for it is what a user waits for; the E2E latency in its mean, for a single one is as
    long as its answer.
    """

    ttft_p99_s: float | None = None
    e2e_mean_s: float | None = None

    def is_met_by(self, summary: Summary) -> bool:
        """Whether requests were served, none failed, and every bound was kept."""
        return (
            bool(summary.requests) and not summary.errors and all(value <= bound for value, bound in self.of(summary))
        )

    def of(self, summary: Summary) -> Iterator[tuple[float, float]]:
        """What was measured and its bound, for each thing that is bounded and was measured."""
        if self.ttft_p99_s is not None and summary.ttft is not None:
            yield summary.ttft.p99_s, self.ttft_p99_s
        if self.e2e_mean_s is not None and summary.e2e is not None:
            yield summary.e2e.mean_s, self.e2e_mean_s


class Bound(StrEnum):
    """How a capacity is to be read."""

    EXACT = ""
    AT_LEAST = "≥ "
    """Every rate that was tried holds."""
    BELOW = "< "
    """No rate that was tried holds."""


class Capacity(msgspec.Struct, frozen=True):
    """Requests a second, and whether that is the capacity itself or only bounds it.

    >>> str(Capacity(12.34)), str(Capacity(20.0, Bound.AT_LEAST))
    ('12.3', '≥ 20')
    """

    rps: float
    bound: Bound = Bound.EXACT

    def __str__(self) -> str:
        return f"{self.bound}{self.rps:.3g}"


def capacity(runs: Iterable[tuple[float, Summary]], slo: CapacitySlo, refused: Collection[float] = ()) -> Capacity:
    """The capacity at `slo`, from runs of one policy at several rates (requests a second) in any order.

    It lies between the last rate that holds and the first, above it, that does not: there where the straight line
    between what was measured at the two crosses the bound; the earliest crossing if several bounds are broken. Where
    requests fail at the higher rate nothing is interpolated: then it is the last rate that holds. A rate above one that
    does not hold counts for nothing. `refused`: rates that do not hold whatever was measured, such as those at which
    queues still grew when the run ended; where the SLO is kept there, it is the last rate that holds, too.

    Raises: ValueError: no runs.
    """
    held: tuple[float, Summary] | None = None
    rps = 0.0
    for rps, summary in sorted(runs, key=lambda run: run[0]):
        if rps in refused or not slo.is_met_by(summary):
            return Capacity(rps, Bound.BELOW) if held is None else Capacity(_crossing(held, (rps, summary), slo))
        held = rps, summary
    if held is None:
        raise ValueError("capacity needs at least one run")
    return Capacity(rps, Bound.AT_LEAST)


def _crossing(held: tuple[float, Summary], broken: tuple[float, Summary], slo: CapacitySlo) -> float:
    (low, kept), (high, over) = held, broken
    if over.errors:
        return low
    pairs = zip(slo.of(kept), slo.of(over), strict=True)
    shares = [(bound - before) / (after - before) for (before, bound), (after, _) in pairs if after > bound]
    return low + min(shares, default=0.0) * (high - low)
