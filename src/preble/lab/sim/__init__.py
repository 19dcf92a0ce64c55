"""A whole cluster without GPUs, faster than real time: the real schedulers on a virtual clock."""

from __future__ import annotations

from preble.lab.sim.config import Cut, Failure, FailureKind, GatewayGroup, SimConfig, SimLinks
from preble.lab.sim.result import SimResult
from preble.lab.sim.simulation import Simulation, simulate

__all__ = [
    "Cut",
    "Failure",
    "FailureKind",
    "GatewayGroup",
    "SimConfig",
    "SimLinks",
    "SimResult",
    "Simulation",
    "simulate",
]
