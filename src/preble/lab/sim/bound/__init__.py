"""What no scheduler can beat on a workload, whoever places its requests and in whichever order they run."""

from __future__ import annotations

from preble.lab.sim.bound.lower import LatencyBound, LowerBound, lower_bound
from preble.lab.sim.bound.population import carried_rate, least_gpu_s
from preble.lab.sim.bound.steady_rate import steady_rate

__all__ = ["LatencyBound", "LowerBound", "carried_rate", "least_gpu_s", "lower_bound", "steady_rate"]
