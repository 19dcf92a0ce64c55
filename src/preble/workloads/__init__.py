"""Workloads: traces, arrivals, popularity, and generated requests."""

from __future__ import annotations

from preble.workloads.model import Segment, Workload, WorkloadRequest
from preble.workloads.plan import WorkloadPlan
from preble.workloads.registry import is_endless, make_workload, usual_prefixes, workload_names
from preble.workloads.resample import resample
from preble.workloads.streams import Stream
from preble.workloads.tokens import packed_prompt
from preble.workloads.trace import read_trace, write_trace

__all__ = [
    "Segment",
    "Stream",
    "Workload",
    "WorkloadPlan",
    "WorkloadRequest",
    "is_endless",
    "make_workload",
    "packed_prompt",
    "read_trace",
    "resample",
    "usual_prefixes",
    "workload_names",
    "write_trace",
]
