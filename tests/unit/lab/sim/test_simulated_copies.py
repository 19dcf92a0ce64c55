"""Copies between simulated replicas: how long they take, what they save, and what ends them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preble.core.costs.model import CostModel
from preble.core.types import Placement, ReplicaId, Request, pack_tokens
from preble.decisions.lines import header_line
from preble.decisions.names import LogNames
from preble.decisions.reader import LogReader
from preble.decisions.writer import LogFile, LogWriter
from preble.errors import ConfigError
from preble.lab.replay.replay import Replay
from preble.lab.sim import Failure, FailureKind, GatewayGroup, SimConfig, SimLinks, SimResult, Simulation, simulate
from preble.lab.sim.replica import SimReplica
from preble.lab.sim.transfers import Copy
from preble.lab.workloads import Workload, WorkloadRequest
from support.small_cluster import PROFILE, own, segment

LINKED = replace(PROFILE, kv_bytes_per_token=1000)
FAST = SimLinks(bytes_per_s=1e9, latency_s=0.001)


def hot_document(count: int = 40, every_s: float = 0.02) -> Workload:
    """Questions about a document, more than one replica can answer in time."""
    document = segment("document", 1800)
    requests = [WorkloadRequest("first", (document, own(0, 20)), 30, arrival_s=0.0)]
    requests += [
        WorkloadRequest(f"ask-{i}", (document, own(i, 200)), 60, arrival_s=1.0 + every_s * i) for i in range(1, count)
    ]
    return Workload("hot document", tuple(requests))


def config(links: SimLinks | None = FAST, **more: object) -> SimConfig:
    return SimConfig(profile=LINKED, replicas=3, links=links, **more)  # type: ignore[arg-type]


def play(config: SimConfig, workload: Workload | None = None) -> tuple[SimResult, list[Placement]]:
    """Run to the end and hold every invariant."""
    placements: list[Placement] = []
    simulation = Simulation(
        config, workload or hot_document(), on_placement=lambda placement, now: placements.append(placement)
    )
    result = simulation.run()
    simulation.check()
    return result, placements


def computed(result: SimResult) -> int:
    return sum(totals.prefill_tokens for totals in result.replicas.values())


def copied(result: SimResult) -> int:
    return sum(totals.copied_tokens for totals in result.replicas.values())


def test_a_hot_document_is_copied_to_the_other_replicas_and_not_computed_there() -> None:
    without, _ = play(config(None))
    result, placements = play(config())
    assert {placement.transfer.source for placement in placements if placement.transfer}
    assert copied(result) >= 1800 // 16 * 16 and computed(result) < computed(without)
    assert copied(without) == 0 and result.summary.errors == 0


def test_a_copied_prompt_is_found_in_the_cache() -> None:
    result, placements = play(config())
    records = {record.request_id: record for record in result.records}
    waited = [placement for placement in placements if placement.transfer]
    assert waited
    for placement in waited:
        assert records[placement.request_id].cached_tokens == placement.matched_tokens


def test_a_request_waits_for_its_copy() -> None:
    result, placements = play(config(SimLinks(bytes_per_s=2e7, latency_s=0.05)))
    records = {record.request_id: record for record in result.records}
    (first, *_) = [placement for placement in placements if placement.transfer]
    assert first.transfer is not None
    assert (records[first.request_id].ttft_s or 0.0) > 0.05 + first.transfer.tokens * 1000 / 2e7


def test_a_slow_link_is_not_used() -> None:
    assert copied(play(config(SimLinks(bytes_per_s=1e6)))[0]) == 0


def test_only_members_of_a_group_copy_from_each_other() -> None:
    _, placements = play(config(SimLinks(bytes_per_s=1e9, groups=(("r0", "r1"),))))
    pairs = {(placement.replica_id, placement.transfer.source) for placement in placements if placement.transfer}
    assert pairs <= {("r0", "r1"), ("r1", "r0")}


def test_several_gateways_copy_too() -> None:
    result, _ = play(config(group=GatewayGroup(gateways=2)))
    assert copied(result) > 0 and result.summary.errors == 0


@settings(max_examples=15, deadline=None)
@given(at_s=st.lists(st.floats(1.0, 2.0), min_size=1, max_size=4), delay_s=st.sampled_from([0.0, 0.01]))
def test_every_request_ends_once_whatever_is_lost_while_copies_run(at_s: list[float], delay_s: float) -> None:
    failures = tuple(Failure(time_s, FailureKind.RESTARTED, f"r{i % 3}") for i, time_s in enumerate(at_s))
    slow = SimLinks(bytes_per_s=2e7, latency_s=0.01)
    result, _ = play(config(slow, failures=failures, dispatch_s=delay_s))
    assert len({record.request_id for record in result.records}) == len(result.records) == 40


def test_a_log_with_copies_replays(tmp_path: Path) -> None:
    cluster, names = config(failures=(Failure(1.2, FailureKind.RESTARTED, "r0"),)), LogNames()
    header = header_line(names, 0.0, 0.0, cluster.scheduler_settings, cluster.told_profile)
    log = LogWriter(LogFile(tmp_path / "log"), header, names, max_bytes=1 << 30, waits=True)
    simulate(cluster, hot_document(), log=log)
    log.close(timeout_s=None)
    text = (tmp_path / "log").read_text()
    for part in ('"transfer":{"source":', '"fact":"transferred"', '"copied_tokens":[', '"ways":['):
        assert part in text
    replayed = Replay(LogReader(tmp_path / "log")).run()
    assert replayed.difference is None and replayed.compared >= 40
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        (line.get("placement") or {}).pop("ways", None)
    (tmp_path / "before").write_text("".join(json.dumps(line) + "\n" for line in lines))
    replayed = Replay(LogReader(tmp_path / "before")).run()  # written before candidates had them
    assert replayed.difference is None and replayed.compared >= 40


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"links": FAST, "profile": PROFILE}, "kv_bytes_per_token"),
        ({"links": SimLinks(bytes_per_s=1.0, groups=(("r0", "r9"),))}, "r9"),
    ],
)
def test_links_that_cannot_be_are_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SimConfig(**{"profile": LINKED, "replicas": 3} | wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"bytes_per_s": 0.0}, {"latency_s": -1.0}, {"groups": (("r0",), ("r0",))}])
def test_a_link_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SimLinks(**{"bytes_per_s": 1.0} | wrong)  # type: ignore[arg-type]


def test_a_copy_of_what_the_target_has_computed_meanwhile_has_come_but_brings_nothing() -> None:
    cluster, prompt = config(), Request.of("r", range(100))
    source, target, empty = (SimReplica(ReplicaId(name), cluster, CostModel(LINKED)) for name in ("r0", "r1", "r2"))
    for replica in (source, target):
        replica.local.add(prompt, pack_tokens([1]), 0.0)
        replica.begin_iteration(0.0)
        replica.end_iteration(0.1)
    assert Copy(prompt, source, target).end()
    assert target.num_copies == 0
    assert not Copy(prompt, empty, target).end()
    source.lose(0.2)
    assert not Copy(prompt, source, target).end()
