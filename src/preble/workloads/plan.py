"""A workload with every arrival fixed: what a load generator sends and a simulator plays."""

from __future__ import annotations

import random

from preble.errors import ConfigError
from preble.workloads.arrivals import make_arrivals
from preble.workloads.model import Workload
from preble.workloads.registry import make_workload


def plan_workload(
    source: str,
    num_requests: int | None,
    rps: float | None,
    seed: int,
    *,
    arrivals: str = "poisson",
    cv: float = 1.0,
    zipf: float = 1.1,
    num_prefixes: int = 64,
) -> Workload:
    """The workload of that name or file, its openers arriving `rps` a second; None for the file's own times.

    A function of its arguments alone. `arrivals`, `cv`: see `make_arrivals`; the rest: see `make_workload`.

    Raises: ConfigError, TraceFormatError.
    """
    workload = make_workload(source, num_requests, seed, zipf=zipf, num_prefixes=num_prefixes)
    if rps is None:
        if workload.has_arrivals:
            return workload
        raise ConfigError(f"workload {source!r} has no arrival times of its own; give a rate (--rps)")
    rng = random.Random(f"arrivals/{seed}")
    return workload.with_arrivals(make_arrivals(arrivals, len(workload.openers), rps, rng, cv=cv))
