"""Clairvoyant references: what a policy could reach that knew all requests beforehand, and what none can beat."""

from __future__ import annotations

from preble.sim.oracle.bound import LatencyBound, OracleBound, lower_bound

__all__ = ["LatencyBound", "OracleBound", "lower_bound"]
