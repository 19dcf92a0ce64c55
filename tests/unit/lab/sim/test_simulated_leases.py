"""A source keeps the prompt of a split for its lease, in the simulator as in the emulator; a late one is given up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from preble.core.replica.scheduler import LocalScheduler
from preble.core.types import KV_LEASE_S, PART_OF_LEASE, ReplicaId, Request, RequestId, pack_tokens
from preble.emulator import EmulatorConfig
from preble.emulator.kv.kept import KeptPrompts
from preble.engines.vllm.answers import TierConfig
from preble.lab.sim import Failure, FailureKind, SimConfig, SimLinks, SimResult, Simulation
from preble.lab.workloads import Segment, Workload, WorkloadRequest
from preble.profiles import load_profile
from support.linked import linked_profile
from support.splitting import always_splitting
from support.waiting import eventually

BLOCK, LEASE_S = 16, 8.0
TOKENS = 20 * BLOCK
SECONDS_TO_SEND = 4.0


def play(folder: Path, *, lease_s: float = LEASE_S, s_per_token: float = 1e-3, lost: float | None = None) -> SimResult:
    """One request, computed on r0 for r1, which may be lost; it decodes for longer than a lease."""
    told = linked_profile(folder, s_per_token=s_per_token, bytes_per_s=1000 * TOKENS / SECONDS_TO_SEND, latency_s=0.0)
    config = SimConfig(
        profile=load_profile(str(told)),
        replicas=2,
        block_size=BLOCK,
        links=SimLinks(bytes_per_s=1000 * TOKENS / SECONDS_TO_SEND, latency_s=0.0, splits=True, lease_s=lease_s),
        failures=() if lost is None else (Failure(lost, FailureKind.LOST, "r1"),),
        sample_s=0.5,
    )
    asked = [WorkloadRequest("ask", (Segment(tokens=pack_tokens(range(TOKENS + 1))),), 4, arrival_s=0.0)]
    later = [WorkloadRequest("other", (Segment(tokens=pack_tokens((1, 2, 3))),), 1, arrival_s=3 * LEASE_S)]
    simulation = Simulation(config, Workload("one", (*asked, *later)), scheduler=always_splitting(told, "r1"))
    result = simulation.run()
    simulation.check()
    return result


def last_kept(result: SimResult) -> tuple[float, int]:
    """Return when the source last had blocks in use of the first request, and how many tokens of KV."""
    source = result.timeline[ReplicaId("r0")]
    seen = [(at, used) for at, used in zip(source.time_s, source.kv_used_tokens, strict=True) if used and at < 20.0]
    return seen[-1]


def test_what_is_fetched_is_kept_no_longer(tmp_path: Path) -> None:
    result = play(tmp_path)
    assert last_kept(result) == (4.0, TOKENS), "computed in 0.3 s, and sent in 4"
    assert [record.error for record in result.records] == [None, None]


def test_what_nobody_fetches_takes_room_until_the_lease_ends(tmp_path: Path) -> None:
    result = play(tmp_path, lost=2.0)
    assert last_kept(result) == (LEASE_S, TOKENS), "it was computed at 0.3 s"
    assert {record.request_id: record.error for record in result.records} == {"ask": None, "other": None}


def test_a_source_that_takes_half_its_lease_is_given_up_and_the_target_computes(tmp_path: Path) -> None:
    lease_s = 0.25 * TOKENS * 1e-3
    result = play(tmp_path, lease_s=lease_s)
    [ask] = [record for record in result.records if record.request_id == "ask"]
    assert ask.error is None and ask.ttft_s is not None
    assert PART_OF_LEASE * lease_s + TOKENS * 1e-3 < ask.ttft_s < SECONDS_TO_SEND, "nothing was sent"
    assert result.replicas[ReplicaId("r1")].prefill_tokens > TOKENS


async def test_the_emulator_keeps_as_much_and_all_have_one_lease() -> None:
    assert (
        EmulatorConfig(profile="tiny-cpu").lease_s
        == TierConfig().kv_lease_duration
        == SimLinks(bytes_per_s=1.0).lease_s
        == KV_LEASE_S
    )
    scheduler = LocalScheduler(replica_id=ReplicaId("r0"), num_blocks=100, block_size=BLOCK)
    request = Request(RequestId("ask"), pack_tokens(range(TOKENS + 1)), 1)
    scheduler.add(request, pack_tokens((1,)), 0.0)
    batch = scheduler.next_batch(0.0)
    assert batch is not None
    scheduler.complete(batch, 0.1)
    KeptPrompts(scheduler, 0.01).keep(request, 0, ("", 0))
    assert scheduler.num_used_blocks * BLOCK == TOKENS
    await eventually(lambda: scheduler.num_used_blocks == 0, "the lease ends")
    await asyncio.sleep(0)


@pytest.mark.parametrize("lease_s", [0.0, -1.0])
def test_a_lease_is_positive(lease_s: float) -> None:
    with pytest.raises(Exception, match="lease_s must be more than 0"):
        SimLinks(bytes_per_s=1.0, lease_s=lease_s)
