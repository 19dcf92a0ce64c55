"""What no scheduler can beat on a workload, whoever places its requests and in whichever order they run."""

from __future__ import annotations

from preble.lab.sim.bound.steady_rate import steady_rate as steady_rate
