"""Policies compared on simulated clusters: workloads x rates x policies x seeds, ranked by capacity at an SLO."""

from __future__ import annotations

from preble.compare.plan import ComparePlan
from preble.compare.result import CompareResult, Run, Standing, read_result
from preble.compare.run import compare_policies

__all__ = ["ComparePlan", "CompareResult", "Run", "Standing", "compare_policies", "read_result"]
