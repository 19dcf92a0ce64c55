"""Arrival times in seconds, fixed before the run (open loop)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from itertools import accumulate

from preble.errors import ConfigError
from preble.lab.workloads.recorded import is_recording, recorded_arrivals

ARRIVALS = ("poisson", "gamma", "uniform", "onoff", "burst")
ON_S = OFF_S = 10.0
"""Lengths of the periods of on-off arrivals, in seconds."""


def make_arrivals(
    kind: str, num_requests: int, rps: float | None, rng: random.Random, *, cv: float = 1.0
) -> list[float]:
    """Return ascending arrival times, the first at 0.0.

    `rps`: mean requests a second. `cv`: coefficient of variation of the gaps, for gamma only: 1 is Poisson, more means
    bursts. Kinds: poisson, gamma, uniform (equal gaps), onoff (Poisson at twice the rate for ten seconds, then
    nothing for ten), burst (all at once), or recorded: a trace file or a stretch of one, FILE[200:2200], whose gaps are
    scaled to `rps`, or kept if it is None.

    Raises: ConfigError: an unknown kind, a rate or cv that is not positive, a missing rate, a recording
    without times. TraceFormatError: a bad trace file.
    """
    if kind not in ARRIVALS and is_recording(kind):
        return recorded_arrivals(kind, num_requests, rps)
    if rps is None:
        raise ConfigError(f"{kind} arrivals need a rate (--rps)")
    if not (0 < rps < math.inf and 0 < cv < math.inf):
        raise ConfigError(f"rate and cv of arrivals must be positive numbers, got {rps} requests/s and cv {cv}")
    if kind == "poisson":
        return _from_gaps(rng.expovariate(rps) for _ in range(num_requests - 1))
    if kind == "gamma":
        return gamma_arrivals(num_requests, rps, cv, rng)
    if kind == "uniform":
        return [i / rps for i in range(num_requests)]
    if kind == "onoff":
        return onoff_arrivals(num_requests, rps, rng)
    if kind == "burst":
        return [0.0] * num_requests
    raise ConfigError(
        f"unknown arrivals {kind!r}; choose one of {', '.join(ARRIVALS)}, or a trace file, FILE or FILE[200:2200]"
    )


def gamma_arrivals(num_requests: int, rps: float, cv: float, rng: random.Random) -> list[float]:
    """Draw gaps from a gamma distribution of mean 1/rps and coefficient of variation cv: shape 1/cv², scale cv²/rps."""
    shape = 1 / cv**2
    return _from_gaps(rng.gammavariate(shape, 1 / (shape * rps)) for _ in range(num_requests - 1))


def onoff_arrivals(num_requests: int, rps: float, rng: random.Random) -> list[float]:
    """Return Poisson arrivals of mean `rps` in on-periods only: `ON_S` of arrivals, then `OFF_S` of none."""
    rate_on = rps * (ON_S + OFF_S) / ON_S
    busy_s = _from_gaps(rng.expovariate(rate_on) for _ in range(num_requests - 1))
    return [time_s + OFF_S * (time_s // ON_S) for time_s in busy_s]


def _from_gaps(gaps: Iterable[float]) -> list[float]:
    return list(accumulate(gaps, initial=0.0))
