"""Clairvoyant references: what none can beat, and placements by somebody who knew all requests beforehand.

`preble.sim.oracle.best_known` is apart, since it runs simulations.
"""

from __future__ import annotations

from preble.sim.oracle.bound import LatencyBound, OracleBound, lower_bound
from preble.sim.oracle.prefix_oracle import Assigned, PrefixOracle

__all__ = ["Assigned", "LatencyBound", "OracleBound", "PrefixOracle", "lower_bound"]
