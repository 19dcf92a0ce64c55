"""The package's public names are a list that changes only on purpose."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import preble
from preble import errors

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "python.md"


PUBLIC_NAMES = """
    BlocksDemoted BlocksEvicted BlocksShared BlocksStored CacheCleared CacheDrift Candidate CapacitySlo Choice
    ClusterView ComparePlan CompareResult ConfigError CostFactors CostModel CostProfile CostTable Ended Engine
    EngineInfo EventsLost Failure FailureKind FirstToken Fleet Forecast GlobalScheduler HotPrefix LaunchOptions Learned
    LearnedLength LoadOptions Moved NoReplicaError NotPlaced Outcome PackedHashes PackedTokens PeerForgotten PeerHeld
    PeerId PeerPlaced PeerReported Placement Policy PrebleError PrefixCopy PrefixReplication PromptPiece PromptTooLong
    Reason RefitSettings ReplicaAdded ReplicaId ReplicaIndex ReplicaRemoved ReplicaSpec ReplicaState ReplicaView
    Reported Request RequestId RequestPlaced SchedulerEvent SchedulerListener SchedulerState Segment SimConfig
    SimResult Stored Target Tier TimerEvent Transfer TransferFailed TransferKind TransferOptions Transferred
    TransfersAllowed TrustChanged UnknownRequest Ways Workload WorkloadPlan WorkloadRequest __version__ choose_by
    compare_policies load_profile make_policy make_workload pack_tokens policy_names profile_names read_trace simulate
    workload_names write_trace
""".split()  # noqa: SIM905


def test_the_public_names_are_these() -> None:
    assert list(preble.__all__) == PUBLIC_NAMES == dir(preble)


def test_every_public_name_exists() -> None:
    assert [name for name in PUBLIC_NAMES if not hasattr(preble, name)] == []


def test_every_public_name_is_documented() -> None:
    documented = re.findall(r"^::: preble\.(?:.*\.)?(\w+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {*documented} >= {*PUBLIC_NAMES} - {"__version__"}


@pytest.mark.parametrize(
    "public",
    [
        preble.GlobalScheduler,
        preble.SchedulerListener,
        preble.SchedulerState,
        preble.ReplicaState,
        preble.Placement,
        preble.Policy,
        preble.Choice,
        preble.ClusterView,
    ],
)
def test_what_the_scheduler_takes_and_gives_is_public(public: type) -> None:
    methods = [value for name, value in vars(public).items() if inspect.isfunction(value) and not name.startswith("_")]
    if not methods and not get_type_hints(public):  # a plain class: its fields are what it is made of
        methods = [vars(public)["__init__"]]
    named = " ".join(str(hint) for of in (public, *methods) for hint in get_type_hints(of).values())
    types = {path.rpartition(".")[2] for path in re.findall(r"preble\.core\.[\w.]+", named)}
    assert types and types <= {*PUBLIC_NAMES}


def test_a_name_that_is_not_public_is_refused() -> None:
    with pytest.raises(AttributeError, match="preble has no public name 'Nothing'"):
        preble.Nothing  # noqa: B018


def test_importing_preble_or_one_room_of_it_imports_nothing_else() -> None:
    code = "import sys, preble; from preble import errors; print(*sorted(n for n in sys.modules if 'preble' in n))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["preble", "preble.errors"]


def test_every_error_is_drawn_in_the_tree() -> None:
    drawn = errors.__doc__ or ""
    missing = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and name not in drawn
    ]
    assert missing == []


def test_every_error_descends_from_the_root() -> None:
    strangers = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and not issubclass(value, errors.PrebleError)
    ]
    assert strangers == []
