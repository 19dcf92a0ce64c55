"""Workloads: traces, arrivals, popularity, and generated requests."""

from __future__ import annotations

from preble.lab.workloads.model import Segment, Workload, WorkloadRequest
from preble.lab.workloads.plan import WorkloadPlan
from preble.lab.workloads.registry import is_endless, make_workload, usual_prefixes, workload_names
from preble.lab.workloads.resample import resample
from preble.lab.workloads.streams import Stream
from preble.lab.workloads.tokens import packed_prompt
from preble.lab.workloads.trace import read_trace, write_trace

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
