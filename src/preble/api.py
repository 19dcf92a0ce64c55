"""The public names of Preble, which `import preble` gives. All else is private and may change at any time.

A name is public if it is imported here as itself. Those of the laboratory are imported when they are used: who serves
does without that room.
"""

from __future__ import annotations

import importlib
import types
import typing

from preble import __version__ as __version__
from preble.core.cluster.links import PrefixCopy as PrefixCopy
from preble.core.costs.model import CostModel as CostModel
from preble.core.costs.model import CostProfile as CostProfile
from preble.core.costs.refit import CostFactors as CostFactors
from preble.core.costs.refit import RefitSettings as RefitSettings
from preble.core.placing.promises import Forecast as Forecast
from preble.core.placing.scheduler import GlobalScheduler as GlobalScheduler
from preble.core.placing.snapshot import HotPrefix as HotPrefix
from preble.core.placing.snapshot import ReplicaState as ReplicaState
from preble.core.placing.snapshot import SchedulerState as SchedulerState
from preble.core.policies.cost_table import CostTable as CostTable
from preble.core.policies.policy import Policy as Policy
from preble.core.policies.scoring import choose_by as choose_by
from preble.core.policies.transfers import TransferOptions as TransferOptions
from preble.core.policies.view import Choice as Choice
from preble.core.policies.view import ClusterView as ClusterView
from preble.core.policies.view import ReplicaView as ReplicaView
from preble.core.prefixes.history import PromptPiece as PromptPiece
from preble.core.replica_index import ReplicaIndex as ReplicaIndex
from preble.core.types import BlocksDemoted as BlocksDemoted
from preble.core.types import BlocksEvicted as BlocksEvicted
from preble.core.types import BlocksShared as BlocksShared
from preble.core.types import BlocksStored as BlocksStored
from preble.core.types import CacheCleared as CacheCleared
from preble.core.types import CacheDrift as CacheDrift
from preble.core.types import Candidate as Candidate
from preble.core.types import EventsLost as EventsLost
from preble.core.types import Learned as Learned
from preble.core.types import LearnedLength as LearnedLength
from preble.core.types import PackedHashes as PackedHashes
from preble.core.types import PackedTokens as PackedTokens
from preble.core.types import PeerId as PeerId
from preble.core.types import Placement as Placement
from preble.core.types import PrefixReplication as PrefixReplication
from preble.core.types import Reason as Reason
from preble.core.types import ReplicaId as ReplicaId
from preble.core.types import ReplicaSpec as ReplicaSpec
from preble.core.types import Request as Request
from preble.core.types import RequestId as RequestId
from preble.core.types import Target as Target
from preble.core.types import Tier as Tier
from preble.core.types import Transfer as Transfer
from preble.core.types import TransferKind as TransferKind
from preble.core.types import Ways as Ways
from preble.core.types import pack_tokens as pack_tokens
from preble.core.types.events import NotPlaced as NotPlaced
from preble.core.types.events import PeerForgotten as PeerForgotten
from preble.core.types.events import PeerHeld as PeerHeld
from preble.core.types.events import PeerPlaced as PeerPlaced
from preble.core.types.events import PeerReported as PeerReported
from preble.core.types.events import ReplicaAdded as ReplicaAdded
from preble.core.types.events import ReplicaRemoved as ReplicaRemoved
from preble.core.types.events import Reported as Reported
from preble.core.types.events import RequestPlaced as RequestPlaced
from preble.core.types.events import SchedulerEvent as SchedulerEvent
from preble.core.types.events import SchedulerListener as SchedulerListener
from preble.core.types.events import Stored as Stored
from preble.core.types.events import TimerEvent as TimerEvent
from preble.core.types.events import TransfersAllowed as TransfersAllowed
from preble.core.types.events import TrustChanged as TrustChanged
from preble.core.types.life import Ended as Ended
from preble.core.types.life import FirstToken as FirstToken
from preble.core.types.life import Moved as Moved
from preble.core.types.life import Outcome as Outcome
from preble.core.types.life import TransferFailed as TransferFailed
from preble.core.types.life import Transferred as Transferred
from preble.engines.adapter import Engine as Engine
from preble.engines.adapter import EngineInfo as EngineInfo
from preble.engines.starting.launch import Fleet as Fleet
from preble.engines.starting.launch import LaunchOptions as LaunchOptions
from preble.errors import ConfigError as ConfigError
from preble.errors import NoReplicaError as NoReplicaError
from preble.errors import PrebleError as PrebleError
from preble.errors import PromptTooLong as PromptTooLong
from preble.errors import UnknownRequest as UnknownRequest
from preble.plugins.policies import make_policy as make_policy
from preble.plugins.policies import policy_names as policy_names
from preble.profiles import load_profile as load_profile
from preble.profiles import profile_names as profile_names

if typing.TYPE_CHECKING:
    from preble.lab.compare import ComparePlan as ComparePlan
    from preble.lab.compare import CompareResult as CompareResult
    from preble.lab.compare import compare_policies as compare_policies
    from preble.lab.metrics.capacity import CapacitySlo as CapacitySlo
    from preble.lab.sim import Failure as Failure
    from preble.lab.sim import FailureKind as FailureKind
    from preble.lab.sim import SimConfig as SimConfig
    from preble.lab.sim import SimResult as SimResult
    from preble.lab.sim import simulate as simulate
    from preble.lab.workloads import LoadOptions as LoadOptions
    from preble.lab.workloads import Segment as Segment
    from preble.lab.workloads import Workload as Workload
    from preble.lab.workloads import WorkloadPlan as WorkloadPlan
    from preble.lab.workloads import WorkloadRequest as WorkloadRequest
    from preble.lab.workloads import make_workload as make_workload
    from preble.lab.workloads import read_trace as read_trace
    from preble.lab.workloads import workload_names as workload_names
    from preble.lab.workloads import write_trace as write_trace

LABORATORY = types.MappingProxyType(
    {
        "preble.lab.compare": "ComparePlan CompareResult compare_policies",
        "preble.lab.metrics.capacity": "CapacitySlo",
        "preble.lab.sim": "Failure FailureKind SimConfig SimResult simulate",
        "preble.lab.workloads": "LoadOptions Segment Workload WorkloadPlan WorkloadRequest make_workload read_trace "
        "workload_names write_trace",
    }
)
"""Its public names, by module."""


if not typing.TYPE_CHECKING:  # a type checker that sees it takes every name, misspelled ones too

    def __getattr__(name: str) -> typing.Any:
        for module, names in LABORATORY.items():
            if name in names.split():
                value = globals()[name] = getattr(importlib.import_module(module), name)
                return value
        raise AttributeError(f"module 'preble.api' has no attribute {name!r}")
