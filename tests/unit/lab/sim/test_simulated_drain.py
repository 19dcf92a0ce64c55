"""A simulated replica that is drained gets no more requests, and others copy from it; one that joins copies, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from preble.errors import ConfigError
from preble.lab.sim import Failure, FailureKind, GatewayGroup, SimConfig, SimLinks, SimResult, Simulation
from preble.lab.workloads import Workload, WorkloadRequest
from support.small_cluster import PROFILE, own, segment

LINKED = replace(PROFILE, kv_bytes_per_token=1000)
FAST = SimLinks(bytes_per_s=1e9, latency_s=0.001)
DRAINED_S, LOST_S = 2.0, 6.0


def sessions(num_sessions: int = 6) -> Workload:
    """Each has a long beginning of its own, and a turn before, while and after a replica is drained."""
    requests = []
    for i in range(num_sessions):
        start = segment(f"session {i}", 900)
        for turn, arrival_s in enumerate((0.1 * i, DRAINED_S + 0.5 + 0.1 * i, LOST_S + 0.5 + 0.1 * i)):
            requests.append(WorkloadRequest(f"{i}-{turn}", (start, own(f"{i}-{turn}", 20)), 5, arrival_s=arrival_s))
    return Workload("sessions", tuple(sorted(requests, key=lambda request: request.arrival_s or 0.0)))


def play(links: SimLinks | None, *failures: Failure, **more: object) -> SimResult:
    """Run to the end and hold every invariant."""
    config = SimConfig(profile=LINKED, replicas=3, links=links, failures=failures, **more)  # type: ignore[arg-type]
    simulation = Simulation(config, sessions())
    result = simulation.run()
    simulation.check()
    assert result.summary.errors == 0
    return result


DRAIN = (Failure(DRAINED_S, FailureKind.DRAINED, "r0"), Failure(LOST_S, FailureKind.LOST, "r0"))


def moved(result: SimResult) -> dict[str, int]:
    """Tokens computed of the second turns of the sessions that began on the drained replica."""
    begun_there = {record.request_id[:-2] for record in result.records if record.replica == "r0"}
    second = [record for record in result.records if record.request_id.endswith("-1")]
    assert begun_there and all(record.replica != "r0" for record in second)
    return {
        record.request_id: record.prompt_tokens - (record.cached_tokens or 0)
        for record in second
        if record.request_id[:-2] in begun_there
    }


def test_a_drained_replica_gets_no_requests_and_its_sessions_are_copied_from_it() -> None:
    without, copied = moved(play(None, *DRAIN)), moved(play(FAST, *DRAIN))
    assert without.keys() == copied.keys()
    assert all(tokens > 900 for tokens in without.values())
    assert all(tokens < 100 for tokens in copied.values())


def test_several_gateways_drain_a_replica_too() -> None:
    copied = moved(play(FAST, *DRAIN, group=GatewayGroup(gateways=2)))
    assert all(tokens < 100 for tokens in copied.values())


def test_a_replica_that_is_drained_and_then_restarted_gets_requests_again() -> None:
    restarted = Failure(LOST_S, FailureKind.RESTARTED, "r0")
    alone = Failure(LOST_S, FailureKind.LOST, "r1"), Failure(LOST_S, FailureKind.LOST, "r2")
    result = play(FAST, DRAIN[0], restarted, *alone)
    assert {record.replica for record in result.records if record.request_id.endswith("-2")} == {"r0"}


def test_requests_fail_where_every_replica_is_drained() -> None:
    config = SimConfig(profile=LINKED, replicas=1, failures=(DRAIN[0],))
    result = Simulation(config, sessions()).run()
    assert {record.error for record in result.records if record.scheduled_s > DRAINED_S} == {"no replica"}


def test_only_a_replica_that_is_there_can_be_drained() -> None:
    with pytest.raises(ConfigError, match="cannot be drained"):
        SimConfig(profile=LINKED, replicas=1, failures=(Failure(1.0, FailureKind.DRAINED, "r1"),))


def test_a_replica_that_joins_copies_what_is_hot() -> None:
    document = segment("document", 1800)
    asks = [WorkloadRequest(f"ask-{i}", (document, own(i, 200)), 60, arrival_s=0.02 * i + (i > 0)) for i in range(60)]
    config = SimConfig(profile=LINKED, replicas=1, links=FAST, failures=(Failure(1.1, FailureKind.ADDED, "r1"),))
    simulation = Simulation(config, Workload("hot document", tuple(asks)))
    result = simulation.run()
    simulation.check()
    joined = [record for record in result.records if record.replica == "r1"]
    assert joined and all((record.cached_tokens or 0) >= 1792 for record in joined)
    assert result.replicas["r1"].copied_tokens == 1792
