"""A workload with every arrival fixed: what a load generator sends and a simulator plays."""

from __future__ import annotations

import random

import msgspec

from preble.errors import ConfigError
from preble.workloads.arrivals import ARRIVALS, make_arrivals
from preble.workloads.model import Workload
from preble.workloads.registry import make_workload


class WorkloadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides what is asked and when; kept in results, so that a run can be repeated.

    `source`: a workload's name, or a trace file. `requests`: how many, None for all of a file. `rps`: requests a second
    on average, None for the file's own arrival times, or for recorded `arrivals` as they are. `arrivals`, `cv`: see
    `make_arrivals`. `zipf`, `num_prefixes`: see `make_workload`.
    """

    source: str
    requests: int | None = None
    rps: float | None = None
    seed: int = 0
    arrivals: str = "poisson"
    cv: float = 1.0
    zipf: float = 1.1
    num_prefixes: int = 64

    def make(self) -> Workload:
        """The workload, its openers with arrival times. The same plan gives the same workload.

        Raises: ConfigError, TraceFormatError.
        """
        workload = make_workload(self.source, self.requests, self.seed, zipf=self.zipf, num_prefixes=self.num_prefixes)
        if self.rps is None and self.arrivals in ARRIVALS:
            if workload.has_arrivals:
                return workload
            raise ConfigError(f"workload {self.source!r} has no arrival times of its own; give a rate (--rps)")
        rng = random.Random(f"arrivals/{self.seed}")
        return workload.with_arrivals(make_arrivals(self.arrivals, len(workload.openers), self.rps, rng, cv=self.cv))
