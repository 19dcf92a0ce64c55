"""The capacity of a cluster: the highest request rate at which a whole run keeps its latency bounds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum

import msgspec

from preble.lab.metrics.summary import Summary


class CapacitySlo(msgspec.Struct, frozen=True):
    """Bounds in seconds on a whole run; None bounds nothing.

    TTFT is bounded at its p99, because a user waits for it. E2E latency is bounded in its mean, because a single one
    depends on the length of its answer.
    """

    ttft_p99_s: float | None = None
    e2e_mean_s: float | None = None

    def is_met_by(self, summary: Summary) -> bool:
        """Return whether the run served requests, none failed, and it kept every bound."""
        return (
            bool(summary.requests) and not summary.errors and all(value <= bound for value, bound in self.of(summary))
        )

    def of(self, summary: Summary) -> Iterator[tuple[float, float]]:
        """Return (measured, bound) for each bounded quantity that was measured."""
        if self.ttft_p99_s is not None and summary.ttft is not None:
            yield summary.ttft.p99_s, self.ttft_p99_s
        if self.e2e_mean_s is not None and summary.e2e is not None:
            yield summary.e2e.mean_s, self.e2e_mean_s


class Bound(StrEnum):
    """How to read a capacity."""

    EXACT = ""
    AT_LEAST = "≥ "
    """Every rate that was tried keeps the bounds."""
    BELOW = "< "
    """No rate that was tried keeps the bounds."""


class Capacity(msgspec.Struct, frozen=True):
    """Requests a second, and whether that is the capacity or a bound on it.

    >>> str(Capacity(12.34)), str(Capacity(20.0, Bound.AT_LEAST))
    ('12.3', '≥ 20')
    """

    rps: float
    bound: Bound = Bound.EXACT

    def __str__(self) -> str:
        return f"{self.bound}{self.rps:.3g}"


def capacity(runs: Iterable[tuple[float, Summary]], slo: CapacitySlo, refused: Collection[float] = ()) -> Capacity:
    """Return the capacity at `slo`, from runs of one policy at several rates (requests a second) in any order.

    It lies between the last rate that keeps the bounds and the next, which breaks one: where the straight line between
    the two measurements crosses the bound (the first crossing if several bounds are broken). If requests fail at the
    higher rate, it is the lower rate. Rates above a rate that breaks a bound do not count. `refused`: rates that count
    as broken whatever was measured, such as those whose queues still grew at the end of the run; if a refused rate kept
    the SLO, the capacity is the rate below it.

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
