"""Splits between simulated replicas: who computes, who decodes, what is gained, and what ends them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from preble.core.types import Placement, TransferKind
from preble.decisions.lines import header_line
from preble.decisions.names import LogNames
from preble.decisions.reader import LogReader
from preble.decisions.writer import LogFile, LogWriter
from preble.lab.metrics.itl import Itl, itl
from preble.lab.replay.replay import Replay
from preble.lab.sim import Failure, FailureKind, SimConfig, SimLinks, SimResult, Simulation, simulate
from preble.lab.workloads import Workload, WorkloadRequest
from support.small_cluster import PROFILE, own

LINKED = replace(PROFILE, kv_bytes_per_token=1000)
FAST = SimLinks(bytes_per_s=1e9, latency_s=0.001, splits=True)
COUNT = 400


def long_answers() -> Workload:
    """Prompts that share nothing, each with an answer that decodes for long."""
    requests = [WorkloadRequest(f"ask-{i}", (own(i, 900),), 300, arrival_s=0.08 * i) for i in range(COUNT)]
    return Workload("long answers", tuple(requests))


def config(links: SimLinks | None = FAST, **more: object) -> SimConfig:
    return SimConfig(profile=LINKED, replicas=4, links=links, **more)  # type: ignore[arg-type]


def play(config: SimConfig) -> tuple[SimResult, list[Placement]]:
    """Run to the end and hold every invariant."""
    placements: list[Placement] = []
    simulation = Simulation(config, long_answers(), on_placement=lambda placement, now: placements.append(placement))
    result = simulation.run()
    simulation.check()
    return result, [placement for placement in placements if placement.transfer]


def late(result: SimResult) -> tuple[Itl, float]:
    """Return the gaps and the mean time of the requests of the second half."""
    records = [record for record in result.records if record.scheduled_s > 0.04 * COUNT]
    gaps = itl(record.gaps for record in records)
    assert gaps is not None
    return gaps, sum(record.end_s - record.scheduled_s for record in records) / len(records)


@pytest.fixture(scope="module")
def whole() -> tuple[SimResult, list[Placement]]:
    return play(config(None))


@pytest.fixture(scope="module")
def split() -> tuple[SimResult, list[Placement]]:
    return play(config())


def test_fewer_answers_stand_still_while_prompts_are_computed(
    whole: tuple[SimResult, list[Placement]], split: tuple[SimResult, list[Placement]]
) -> None:
    """Once the replicas have taken roles."""
    (gaps, e2e_s), (split_gaps, split_e2e_s) = (late(result) for result, _ in (whole, split))
    assert not whole[1] and len(split[1]) > COUNT / 2 and split[0].summary.errors == 0
    assert {placement.transfer.kind for placement in split[1] if placement.transfer} == {TransferKind.PREFILL}
    assert split_gaps.p99_s < gaps.p99_s / 2 and split_e2e_s < e2e_s


def test_a_prompt_is_computed_once(split: tuple[SimResult, list[Placement]]) -> None:
    result, placements = split
    rest = 16 * len(placements)  # the target computes what is left of the last block
    computed = sum(totals.prefill_tokens for totals in result.replicas.values())
    prompts = sum(record.prompt_tokens for record in result.records)
    assert prompts < computed <= prompts + rest
    assert all(record.cached_tokens == 0 for record in result.records)


@pytest.mark.slow
def test_the_first_token_comes_after_the_transfer() -> None:
    result, split = play(config(SimLinks(bytes_per_s=1e8, latency_s=0.01, splits=True)))
    records = {record.request_id: record for record in result.records}
    assert split
    for placement in split:
        assert placement.transfer is not None
        least_s = 0.01 + placement.transfer.tokens * 1000 / 1e8
        assert (records[placement.request_id].ttft_s or 0.0) > least_s


def test_replicas_do_not_split_unless_they_are_told_to(whole: tuple[SimResult, list[Placement]]) -> None:
    plain, placements = play(config(SimLinks(bytes_per_s=1e9)))
    assert not placements and plain.records == whole[0].records


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FailureKind.RESTARTED, FailureKind.LOST])
@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_every_request_ends_once_whatever_is_lost_while_splits_run(kind: FailureKind, delay_s: float) -> None:
    failures = tuple(Failure(26.0 + 2.03 * i, kind, f"r{i}") for i in range(3))
    result, placements = play(config(failures=failures, dispatch_s=delay_s))
    assert placements and len({record.request_id for record in result.records}) == len(result.records) == COUNT


@pytest.mark.slow
def test_a_log_with_splits_replays(tmp_path: Path) -> None:
    cluster, names = config(failures=(Failure(25.0, FailureKind.RESTARTED, "r0"),)), LogNames()
    header = header_line(names, 0.0, 0.0, cluster.scheduler_settings, cluster.told_profile)
    log = LogWriter(LogFile(tmp_path / "log"), header, names, max_bytes=1 << 30, waits=True)
    simulate(cluster, long_answers(), log=log)
    log.close(timeout_s=None)
    text = (tmp_path / "log").read_text()
    assert '"kind":"prefill"' in text and '"fact":"transferred"' in text
    replayed = Replay(LogReader(tmp_path / "log")).run()
    assert replayed.difference is None and replayed.compared >= COUNT
