"""Measure a live replica over its API, and fit a `CostProfile` to the times.

`measure` talks to the replica; the rest is pure and needs only numpy and msgspec. So
`benchmarks/repro/gpu_profile.py`, which measures a GPU without a server, can use it beside PyTorch.
"""

from __future__ import annotations

from preble.lab.profiling.fit import Fit as Fit
from preble.lab.profiling.fit import FittedTime as FittedTime
from preble.lab.profiling.fit import fit_profile as fit_profile
from preble.lab.profiling.measurements import AdmissionTimes as AdmissionTimes
from preble.lab.profiling.measurements import DecodeTimes as DecodeTimes
from preble.lab.profiling.measurements import LoadTimes as LoadTimes
from preble.lab.profiling.measurements import Measurements as Measurements
from preble.lab.profiling.measurements import PrefillTimes as PrefillTimes
from preble.lab.profiling.plan import Plan as Plan
from preble.lab.profiling.plan import make_plan as make_plan
