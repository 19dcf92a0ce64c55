"""Policies compared on simulated clusters: workloads x rates x policies x seeds, ranked by capacity at an SLO."""

from __future__ import annotations

from preble.lab.compare.plan import ComparePlan
from preble.lab.compare.result import CompareResult, PolicyStanding, Run, read_result
from preble.lab.compare.run import compare_policies

__all__ = ["ComparePlan", "CompareResult", "PolicyStanding", "Run", "compare_policies", "read_result"]
