"""A cost profile from measurements: a live replica is timed over its API, and a `CostProfile` is fitted to the times.

`measure` talks to the replica, `fit` is pure. `preble profile` does both; `benchmarks/repro/gpu_profile.py` measures a
GPU without a server and uses the fit alone.
"""

from __future__ import annotations

from preble.profiling.fit import Fit, FittedTime, fit_profile
from preble.profiling.measure import Measuring
from preble.profiling.measurements import DecodeTimes, Measurements, PrefillTimes
from preble.profiling.plan import Plan, make_plan

__all__ = [
    "DecodeTimes",
    "Fit",
    "FittedTime",
    "Measurements",
    "Measuring",
    "Plan",
    "PrefillTimes",
    "fit_profile",
    "make_plan",
]
