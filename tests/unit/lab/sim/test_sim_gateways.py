"""Several gateways in one simulation."""

from __future__ import annotations

from collections.abc import Sized

import pytest

from preble.core.types import ReplicaId, ReplicaSpec, Request, Target
from preble.errors import ConfigError, NoReplicaError
from preble.lab.sim import Cut, GatewayGroup, SimConfig, Simulation, simulate
from preble.lab.sim.gateways import Gateways
from preble.lab.workloads import WorkloadPlan
from preble.plugins.policies import make_policy
from support.small_cluster import PROFILE, workload

NEVER = GatewayGroup(gateways=4, delay_s=None)
LONGDOC = WorkloadPlan(source="longdoc", requests=80, seed=1, rps=8.0).make()


def config(group: GatewayGroup | None, **changes: object) -> SimConfig:
    return SimConfig(profile=PROFILE, replicas=3, group=group, **changes)  # type: ignore[arg-type]


def computed_tokens(group: GatewayGroup | None) -> int:
    return sum(totals.prefill_tokens for totals in simulate(config(group), LONGDOC).replicas.values())


def test_one_gateway_of_a_group_decides_as_one_alone() -> None:
    alone, one = simulate(config(None), workload()), simulate(config(GatewayGroup(gateways=1)), workload())
    assert alone.records == one.records


def test_telling_placements_keeps_prefixes_together() -> None:
    alone, told, never = (computed_tokens(group) for group in (None, GatewayGroup(gateways=4), NEVER))
    assert told < 1.1 * alone, (alone, told)
    assert never > 1.3 * alone, (alone, never)


def test_the_same_seed_gives_the_same_result() -> None:
    group = GatewayGroup(gateways=3, loss=0.2, cuts=(Cut(0.5, 1.0),))
    assert simulate(config(group), workload()).records == simulate(config(group), workload()).records


@pytest.mark.parametrize(
    "group",
    [
        GatewayGroup(gateways=3),
        GatewayGroup(gateways=3, loss=0.5),
        GatewayGroup(gateways=2, cuts=(Cut(0.0, 7.0),)),
        GatewayGroup(gateways=2, delay_s=0.0),
        NEVER,
    ],
)
def test_nothing_is_in_flight_once_all_has_ended(group: GatewayGroup) -> None:
    placer = Gateways(config(group), group)
    Simulation(config(group), workload(), scheduler=placer).run()
    now = 1000.0
    for _ in range(20):
        now += 1.0
        placer.on_timer(now)
    placer.check()
    for scheduler in placer.schedulers:
        assert (scheduler.snapshot().num_in_flight, scheduler.snapshot().num_assumed) == (0, 0)


def test_gateways_break_ties_differently() -> None:
    """Each gateway sees eight idle replicas that are all the same; with one seed, all would choose the same one."""
    group = GatewayGroup(gateways=8, delay_s=None)
    placer = Gateways(config(group), group)
    for name in "abcdefgh":
        placer.add_replica(ReplicaSpec(ReplicaId(name)), 0.0)
    request = Request.of("q", range(100))
    assert len({scheduler.place(request, 0.0).replica_id for scheduler in placer.schedulers}) > 1


def test_a_policy_object_cannot_serve_several_gateways() -> None:
    with pytest.raises(ConfigError, match="a policy of its own"):
        simulate(config(NEVER), workload(), policy=make_policy("preble"))


@pytest.mark.parametrize("text", ["", "5", "5:4", "-1:3", "a:b", "1:inf"])
def test_a_cut_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="FROM:UNTIL"):
        Cut.parse(text)


@pytest.mark.parametrize("wrong", [{"gateways": 0}, {"delay_s": -1.0}, {"loss": 1.0}])
def test_a_group_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        GatewayGroup(**wrong)  # type: ignore[arg-type]


def test_requests_that_are_never_placed_leave_nothing_at_their_gateway() -> None:
    gateways = Gateways(SimConfig(profile=PROFILE, replicas=0), GatewayGroup(gateways=2))
    sizes = {name: len(kept) for name, kept in vars(gateways).items() if isinstance(kept, Sized)}
    for i in range(50):
        with pytest.raises(NoReplicaError):
            gateways.place(Request.of(f"r{i}", [1, 2, 3]), 0.0)
    assert {name: len(kept) for name, kept in vars(gateways).items() if isinstance(kept, Sized)} == sizes


def test_requests_with_targets_wait_for_several_gateways_too() -> None:
    asked = WorkloadPlan(source="tool_use", requests=20, rps=4.0).make()
    result = simulate(config(GatewayGroup(gateways=2)), asked, target_of=lambda asked: Target(ttft_s=60.0))
    assert not result.summary.errors and len(result.records) == 20
