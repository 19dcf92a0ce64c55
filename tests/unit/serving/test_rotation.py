"""Replicas leave the rotation: everything hears of it, whatever fails."""

from __future__ import annotations

from operator import attrgetter
from typing import Any
from unittest.mock import Mock

import pytest

from preble.core.costs.model import CostModel, CostProfile
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import make_policy
from preble.core.types import ReplicaId, ReplicaSpec, Request, RequestId
from preble.decisions.recent import RecentDecisions
from preble.engines.adapter import EngineInfo
from preble.errors import UnknownModel
from preble.serving.placements import Dispatcher, Placements
from preble.serving.replicas.rotation import Rotation
from preble.serving.telemetry.metrics import Telemetry
from preble.serving.terms import Terms

PROFILE = CostProfile("test", "made up", ((0, 0.0), (1000, 0.1)), 0.0, 0.02, 0.0, 0.0, 100_000)
REPLICA = ReplicaId("a")


@pytest.mark.parametrize("failing", ["recent.on", "telemetry.replica_down"])
async def test_all_requests_of_a_replica_that_leaves_are_lost_whatever_fails(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    scheduler = GlobalScheduler(make_policy("round_robin"), CostModel(PROFILE))
    placements = Placements(scheduler, Telemetry(), RecentDecisions("round_robin", 10))
    rotation = Rotation(placements)
    rotation.add(Mock(replica_id=REPLICA), EngineInfo("fake", ("",), ReplicaSpec(REPLICA)))
    dispatcher = Dispatcher(placements)
    placed = [dispatcher.place(Request.of(name, range(40)), Terms(name)) for name in map(RequestId, "123")]

    path, _, method = failing.rpartition(".")
    whole = getattr(part := attrgetter(path)(placements), method)

    def fails_afterwards(*args: Any) -> None:
        whole(*args)
        raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(part, method, fails_afterwards)
        rotation.remove(REPLICA, "it has gone")
    assert [one.is_lost for one in placed] == [True] * 3
    assert placements.in_flight == {} and REPLICA not in placements.replicas
    assert scheduler.snapshot().replicas == {} == placements.ejection._replicas
    for one in placed:
        one.end()
    assert not placements.running()
    placements.timer.close()


async def test_an_unknown_model_is_answered_with_some_of_the_names_however_many_are_served() -> None:
    placements = Placements(
        GlobalScheduler(make_policy("round_robin"), CostModel(PROFILE)), Telemetry(), RecentDecisions("round_robin", 10)
    )
    names = tuple(f"model-{number:03}" for number in range(500))
    Rotation(placements).add(Mock(replica_id=REPLICA), EngineInfo("fake", names, ReplicaSpec(REPLICA)))
    with pytest.raises(UnknownModel, match=r"there are: model-000, .*, model-019 and 480 more: GET /v1/models$"):
        placements.replicas.of_model("other")
    placements.timer.close()
