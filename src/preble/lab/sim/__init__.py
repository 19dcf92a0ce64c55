"""A whole cluster without GPUs, faster than real time: the real schedulers on a virtual clock."""

from __future__ import annotations

from preble.lab.sim.config import Cut as Cut
from preble.lab.sim.config import Failure as Failure
from preble.lab.sim.config import FailureKind as FailureKind
from preble.lab.sim.config import GatewayGroup as GatewayGroup
from preble.lab.sim.config import SimConfig as SimConfig
from preble.lab.sim.config import SimLinks as SimLinks
from preble.lab.sim.result import SimResult as SimResult
from preble.lab.sim.simulation import Simulation as Simulation
from preble.lab.sim.simulation import simulate as simulate
