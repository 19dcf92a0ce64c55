"""Simulated replicas with fixed roles: pairs of one that computes the prompt and one that decodes its answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from preble.core.types import Placement, TransferKind
from preble.decisions.lines import header_line
from preble.decisions.names import LogNames
from preble.decisions.reader import LogReader
from preble.decisions.writer import LogFile, LogWriter
from preble.errors import ConfigError
from preble.lab.replay.replay import Replay
from preble.lab.sim import Failure, FailureKind, SimConfig, SimLinks, SimResult, Simulation, simulate
from preble.lab.sim.calls import NO_REPLICA, REPLICA_LOST
from preble.lab.workloads import Workload, WorkloadRequest
from support.small_cluster import PROFILE, own

LINKED = replace(PROFILE, kv_bytes_per_token=1000)
COUNT = 200
NUM_SHARED, NUM_OWN = 600, 100


def config(*, prefill: int = 2, **more: object) -> SimConfig:
    links = SimLinks(bytes_per_s=1e9, latency_s=0.001, prefill=prefill)
    return SimConfig(profile=LINKED, replicas=5, links=links, **more)  # type: ignore[arg-type]


def documents() -> Workload:
    """Questions about four documents in turns."""
    asks = [((own(i % 4, NUM_SHARED), own(1000 + i, NUM_OWN)), 0.05 * i) for i in range(COUNT)]
    return Workload(
        "documents", tuple(WorkloadRequest(f"q{i}", ask, 40, arrival_s=at) for i, (ask, at) in enumerate(asks))
    )


def play(config: SimConfig) -> tuple[SimResult, list[Placement]]:
    """Run to the end and hold every invariant."""
    placements: list[Placement] = []
    simulation = Simulation(config, documents(), on_placement=lambda placement, now: placements.append(placement))
    result = simulation.run()
    simulation.check()
    return result, placements


def test_every_request_gets_a_pair_and_its_prompt_is_computed_on_the_one_that_has_it() -> None:
    result, placements = play(config())
    assert result.summary.errors == 0 and len(placements) == COUNT
    sources = [placement.transfer.source for placement in placements if placement.transfer]
    assert len(sources) == COUNT and set(sources) == {"r0", "r1"}
    assert {placement.transfer.kind for placement in placements if placement.transfer} == {TransferKind.PREFILL}
    assert {placement.replica_id for placement in placements} == {"r2", "r3", "r4"}
    computed = sum(result.replicas[name].prefill_tokens for name in ("r0", "r1"))
    assert computed < COUNT * (NUM_OWN + 16) + 2 * 4 * NUM_SHARED
    cached = [record.cached_tokens or 0 for record in result.records]
    assert sum(tokens >= NUM_SHARED - 16 for tokens in cached) > 0.9 * COUNT  # as the source reports


@pytest.mark.parametrize("policy", ["e2", "least_load", "round_robin", "sticky_until_saturated"])
def test_pairs_are_made_under_every_policy(policy: str) -> None:
    result, placements = play(config(policy=policy))
    assert result.summary.errors == 0 and all(placement.transfer for placement in placements)


def test_a_lost_source_costs_its_requests_a_second_placement() -> None:
    lost = (Failure(4.001, FailureKind.LOST, "r0"), Failure(7.0, FailureKind.ADDED, "r9"))
    result, placements = play(config(failures=lost, dispatch_s=0.2))
    assert len(result.records) == COUNT and {record.error for record in result.records} == {None}
    assert len(placements) > COUNT
    assert "r9" in {placement.replica_id for placement in placements}  # who joins decodes


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_every_request_ends_once_whatever_is_lost_while_pairs_run(delay_s: float) -> None:
    failures = tuple(Failure(2.03 + 1.57 * i, FailureKind.RESTARTED, f"r{i}") for i in range(5))
    result, _ = play(config(failures=failures, dispatch_s=delay_s))
    assert len({record.request_id for record in result.records}) == len(result.records) == COUNT
    assert {record.error for record in result.records} <= {None, REPLICA_LOST}


def test_without_a_source_requests_end_with_an_error() -> None:
    result, _ = play(config(prefill=1, failures=(Failure(5.0, FailureKind.LOST, "r0"),)))
    assert {record.error for record in result.records if record.scheduled_s > 5.0} == {NO_REPLICA}


def test_a_log_with_pairs_replays(tmp_path: Path) -> None:
    cluster, names = config(failures=(Failure(5.0, FailureKind.RESTARTED, "r0"),)), LogNames()
    header = header_line(names, 0.0, 0.0, cluster.scheduler_settings, cluster.told_profile)
    log = LogWriter(LogFile(tmp_path / "log"), header, names, max_bytes=1 << 30, waits=True)
    simulate(cluster, documents(), log=log)
    log.close(timeout_s=None)
    replayed = Replay(LogReader(tmp_path / "log")).run()
    assert replayed.difference is None and replayed.compared >= COUNT


@pytest.mark.parametrize(("prefill", "splits"), [(5, False), (-1, False), (1, True)])
def test_roles_that_cannot_be_are_refused(prefill: int, splits: bool) -> None:
    with pytest.raises(ConfigError):
        SimConfig(profile=LINKED, replicas=5, links=SimLinks(bytes_per_s=1e9, prefill=prefill, splits=splits))
