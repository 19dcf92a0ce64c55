"""The public names of Preble, which `import preble` gives. All else is private and may change at any time."""

from __future__ import annotations

from preble import __version__
from preble.compare import ComparePlan, CompareResult, compare_policies
from preble.core.cluster.rebalance import RebalanceSettings
from preble.core.costs.model import CostModel, CostProfile
from preble.core.costs.refit import CostFactors, RefitSettings
from preble.core.placing.listener import SchedulerListener
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
    PackedHashes,
    PackedTokens,
    PeerEnded,
    PeerFirstToken,
    PeerHeld,
    PeerId,
    PeerPlaced,
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
from preble.engines.adapter import Engine, EngineInfo
from preble.engines.launch import Fleet, LaunchOptions
from preble.errors import ConfigError, NoReplicaError, PrebleError, PromptTooLong, UnknownRequest
from preble.metrics.capacity import CapacitySlo
from preble.policies import make_policy, policy_names
from preble.profiles import load_profile, profile_names
from preble.sim import Failure, FailureKind, SimConfig, SimResult, simulate
from preble.workloads import (
    Segment,
    Workload,
    WorkloadPlan,
    WorkloadRequest,
    make_workload,
    read_trace,
    workload_names,
    write_trace,
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
    "Engine",
    "EngineInfo",
    "EventsLost",
    "Failure",
    "FailureKind",
    "Fleet",
    "GlobalScheduler",
    "HotPrefix",
    "LaunchOptions",
    "NoReplicaError",
    "PackedHashes",
    "PackedTokens",
    "PeerEnded",
    "PeerFirstToken",
    "PeerHeld",
    "PeerId",
    "PeerPlaced",
    "Placement",
    "Policy",
    "PrebleError",
    "PrefixReplication",
    "PromptPiece",
    "PromptTooLong",
    "Reason",
    "RebalanceSettings",
    "RefitSettings",
    "ReplicaId",
    "ReplicaIndex",
    "ReplicaSpec",
    "ReplicaState",
    "ReplicaView",
    "Request",
    "RequestId",
    "SchedulerListener",
    "SchedulerState",
    "Segment",
    "SimConfig",
    "SimResult",
    "Tier",
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
