"""What no scheduler can beat on a workload, whoever places its requests and in whichever order they run."""

from __future__ import annotations

from preble.sim.bound.lower import LatencyBound, LowerBound, lower_bound
from preble.sim.bound.population import carried_rate, least_gpu_s
from preble.sim.bound.steady_rate import steady_rate

__all__ = ["LatencyBound", "LowerBound", "carried_rate", "least_gpu_s", "lower_bound", "steady_rate"]
