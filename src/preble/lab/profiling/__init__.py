"""Measure a live replica over its API, and fit a `CostProfile` to the times.

`measure` talks to the replica; the rest is pure and needs only numpy and msgspec. So
`benchmarks/repro/gpu_profile.py`, which measures a GPU without a server, can use it beside PyTorch.
"""

from __future__ import annotations

from preble.lab.profiling.fit import Fit, FittedTime, fit_profile
from preble.lab.profiling.measurements import AdmissionTimes, DecodeTimes, LoadTimes, Measurements, PrefillTimes
from preble.lab.profiling.plan import Plan, make_plan

__all__ = [
    "AdmissionTimes",
    "DecodeTimes",
    "Fit",
    "FittedTime",
    "LoadTimes",
    "Measurements",
    "Plan",
    "PrefillTimes",
    "fit_profile",
    "make_plan",
]
