"""The operator hears of a prefix index that is too small for the replicas' caches."""

from __future__ import annotations

import structlog
from structlog.testing import capture_logs

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import make_policy
from preble.core.types import ReplicaId, ReplicaSpec
from preble.serving.telemetry.metrics import Telemetry
from support.by_hand import MODEL


def warnings(budget_bytes: int | None, *capacities: int | None) -> list[str]:
    """What is logged while replicas with caches of N tokens join."""
    structlog.reset_defaults()
    made = GlobalScheduler(make_policy("preble"), MODEL, index_budget_bytes=budget_bytes)
    with capture_logs() as logs:
        telemetry = Telemetry()
        for i, capacity in enumerate(capacities):
            before = made.snapshot()
            made.add_replica(ReplicaSpec(ReplicaId(str(i)), kv_capacity_tokens=capacity), 0.0)
            telemetry.index_may_be_short(before, made.snapshot())
    return [entry["advice"] for entry in logs if entry["event"] == "index_budget_small"]


def test_a_budget_that_holds_less_than_the_caches_is_warned_of_once() -> None:
    assert warnings(2**20, 100_000) == []
    assert warnings(2**20, 100_000, 100_000, 100_000) == ["scheduler.index_budget_mib: 2 is enough for all"]


def test_nothing_is_said_where_sizes_or_the_limit_are_not_known() -> None:
    assert warnings(None, 10**9) == []
    assert warnings(2**20, None, None) == []
