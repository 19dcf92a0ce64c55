"""The public names of Preble, which `import preble` gives. All else is private and may change at any time.

Names of the laboratory are imported when they are used: who serves does without that room.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from preble import __version__
from preble.core.costs.model import CostModel, CostProfile
from preble.core.costs.refit import CostFactors, RefitSettings
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.placing.snapshot import HotPrefix, ReplicaState, SchedulerState
from preble.core.policies.cost_table import CostTable
from preble.core.policies.policy import Choice, Policy
from preble.core.policies.scoring import choose_by
from preble.core.policies.view import ClusterView, PromptPiece, ReplicaView
from preble.core.replica_index import ReplicaIndex
from preble.core.types import (
    BlocksDemoted,
    BlocksEvicted,
    BlocksShared,
    BlocksStored,
    CacheCleared,
    CacheDrift,
    Candidate,
    EventsLost,
    Learned,
    LearnedLength,
    PackedHashes,
    PackedTokens,
    PeerId,
    Placement,
    PrefixReplication,
    Reason,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Tier,
    pack_tokens,
)
from preble.core.types.events import (
    NotPlaced,
    PeerForgotten,
    PeerHeld,
    PeerPlaced,
    PeerReported,
    ReplicaAdded,
    ReplicaRemoved,
    Reported,
    RequestPlaced,
    SchedulerEvent,
    SchedulerListener,
    Stored,
    TimerEvent,
    TrustChanged,
)
from preble.core.types.life import Ended, FirstToken, Moved, Outcome
from preble.engines.adapter import Engine, EngineInfo
from preble.engines.launch import Fleet, LaunchOptions
from preble.errors import ConfigError, NoReplicaError, PrebleError, PromptTooLong, UnknownRequest
from preble.plugins.policies import make_policy, policy_names
from preble.profiles import load_profile, profile_names

if TYPE_CHECKING:
    from preble.lab.compare import ComparePlan, CompareResult, compare_policies
    from preble.lab.metrics.capacity import CapacitySlo
    from preble.lab.sim import Failure, FailureKind, SimConfig, SimResult, simulate
    from preble.lab.workloads import (
        Segment,
        Workload,
        WorkloadPlan,
        WorkloadRequest,
        make_workload,
        read_trace,
        workload_names,
        write_trace,
    )

_OF_THE_LABORATORY = MappingProxyType(
    {
        "CapacitySlo": "lab.metrics.capacity",
        "ComparePlan": "lab.compare",
        "CompareResult": "lab.compare",
        "Failure": "lab.sim",
        "FailureKind": "lab.sim",
        "Segment": "lab.workloads",
        "SimConfig": "lab.sim",
        "SimResult": "lab.sim",
        "Workload": "lab.workloads",
        "WorkloadPlan": "lab.workloads",
        "WorkloadRequest": "lab.workloads",
        "compare_policies": "lab.compare",
        "make_workload": "lab.workloads",
        "read_trace": "lab.workloads",
        "simulate": "lab.sim",
        "workload_names": "lab.workloads",
        "write_trace": "lab.workloads",
    }
)

__all__ = [
    "BlocksDemoted",
    "BlocksEvicted",
    "BlocksShared",
    "BlocksStored",
    "CacheCleared",
    "CacheDrift",
    "Candidate",
    "CapacitySlo",
    "Choice",
    "ClusterView",
    "ComparePlan",
    "CompareResult",
    "ConfigError",
    "CostFactors",
    "CostModel",
    "CostProfile",
    "CostTable",
    "Ended",
    "Engine",
    "EngineInfo",
    "EventsLost",
    "Failure",
    "FailureKind",
    "FirstToken",
    "Fleet",
    "GlobalScheduler",
    "HotPrefix",
    "LaunchOptions",
    "Learned",
    "LearnedLength",
    "Moved",
    "NoReplicaError",
    "NotPlaced",
    "Outcome",
    "PackedHashes",
    "PackedTokens",
    "PeerForgotten",
    "PeerHeld",
    "PeerId",
    "PeerPlaced",
    "PeerReported",
    "Placement",
    "Policy",
    "PrebleError",
    "PrefixReplication",
    "PromptPiece",
    "PromptTooLong",
    "Reason",
    "RefitSettings",
    "ReplicaAdded",
    "ReplicaId",
    "ReplicaIndex",
    "ReplicaRemoved",
    "ReplicaSpec",
    "ReplicaState",
    "ReplicaView",
    "Reported",
    "Request",
    "RequestId",
    "RequestPlaced",
    "SchedulerEvent",
    "SchedulerListener",
    "SchedulerState",
    "Segment",
    "SimConfig",
    "SimResult",
    "Stored",
    "Tier",
    "TimerEvent",
    "TrustChanged",
    "UnknownRequest",
    "Workload",
    "WorkloadPlan",
    "WorkloadRequest",
    "__version__",
    "choose_by",
    "compare_policies",
    "load_profile",
    "make_policy",
    "make_workload",
    "pack_tokens",
    "policy_names",
    "profile_names",
    "read_trace",
    "simulate",
    "workload_names",
    "write_trace",
]


if not TYPE_CHECKING:  # a type checker that sees it takes every name, misspelled ones too

    def __getattr__(name: str) -> Any:
        if name not in _OF_THE_LABORATORY:
            raise AttributeError(f"module 'preble.api' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"preble.{_OF_THE_LABORATORY[name]}"), name)
        return value
