"""Workloads: traces, arrivals, popularity, and generated requests."""

from __future__ import annotations

from preble.lab.workloads.loaders import LoadOptions as LoadOptions
from preble.lab.workloads.loaders import read_trace as read_trace
from preble.lab.workloads.model import Segment as Segment
from preble.lab.workloads.model import Workload as Workload
from preble.lab.workloads.model import WorkloadRequest as WorkloadRequest
from preble.lab.workloads.plan import WorkloadPlan as WorkloadPlan
from preble.lab.workloads.registry import is_endless as is_endless
from preble.lab.workloads.registry import make_workload as make_workload
from preble.lab.workloads.registry import usual_prefixes as usual_prefixes
from preble.lab.workloads.registry import workload_names as workload_names
from preble.lab.workloads.resample import resample as resample
from preble.lab.workloads.streams import Stream as Stream
from preble.lab.workloads.tokens import packed_prompt as packed_prompt
from preble.lab.workloads.trace import write_trace as write_trace
