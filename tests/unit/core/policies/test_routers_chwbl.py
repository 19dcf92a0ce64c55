"""KubeAI's rule, worked by hand; see test_routers.py."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from preble.core.policies.registry import policy_names, reads_token_ids
from preble.core.policies.routers.kubeai import Chwbl
from preble.core.types import ReplicaId, ReplicaSpec, Request
from preble.decisions.names import LogNames
from preble.decisions.reader import LogReader
from preble.decisions.settings import SchedulerSettings
from preble.errors import ConfigError
from preble.lab.replay.replay import Replay
from support.by_hand import DOC, A, B, C, Cluster, D, run_of
from support.logs import Recording


def test_chwbl_keeps_to_its_place_until_the_load_bound() -> None:
    made = Cluster(Chwbl(), A, B)
    homes = [made.ask(DOC).replica_id for _ in range(4)]
    home, other = homes[0], next(iter({A, B} - {homes[0]}))
    # total q before each: 0, 1, 2, 3; limits 1.25 x (total + 1) / 2: 0.625, 1.25, 1.875, 2.5; q of the home: 0, 1, 2, 2
    assert homes == [home, home, other, home]


def test_chwbl_hashes_the_first_tokens_only() -> None:
    made = Cluster(Chwbl(prefix_tokens=25), A, B, C, D)

    def home(prompt: list[int]) -> ReplicaId:
        placement = made.ask(prompt)
        made.finish(placement.request_id)
        return placement.replica_id

    assert {home(DOC[:25] + run_of(i, 30)) for i in range(2, 30)} == {home(DOC)}
    assert {home([*DOC[:24], i]) for i in range(30)} == {A, B, C, D}


def homes(made: Cluster, count: int = 60) -> list[ReplicaId]:
    """Where prompts go with nothing in flight."""
    found = []
    for i in range(count):
        placement = made.ask(run_of(1000 + i, 30))
        made.finish(placement.request_id)
        found.append(placement.replica_id)
    return found


def test_chwbl_moves_only_what_was_on_a_replica_that_left_and_gives_it_back() -> None:
    made = Cluster(Chwbl(), A, B, C)
    before = homes(made)
    made.scheduler.remove_replica(B, 0.0)
    without = homes(made)
    assert B not in without
    assert all(now == then for now, then in zip(without, before, strict=True) if then != B)
    made.scheduler.add_replica(ReplicaSpec(B, block_size=1), 0.0)
    assert homes(made) == before


def test_chwbl_spreads_prompts_over_the_ring() -> None:
    assert min(Counter(homes(Cluster(Chwbl(), A, B, C), 300)).values()) > 60


def test_chwbl_s_hash_is_the_same_in_every_process() -> None:
    """Otherwise two gateways, or one restarted, would disagree. Written down once."""
    assert "".join(homes(Cluster(Chwbl(), A, B, C, D), 24)) == "cbdbbbbadbccdcaccbcbbabb"


def test_a_log_of_chwbl_replays_with_plain_tokens_only(tmp_path: Path) -> None:
    def log(names: LogNames) -> LogReader:
        recording = Recording(SchedulerSettings(policy="chwbl"), names)
        for name in (A, B):
            recording.scheduler.add_replica(ReplicaSpec(name), 0.0)
        for i in range(20):
            recording.scheduler.place(Request.of(f"q{i}", run_of(i, 30)), 0.0)
        return LogReader(recording.written_to(tmp_path / "log.jsonl"))

    assert Replay(log(LogNames())).run().difference is None
    with pytest.raises(ConfigError, match=r'token ids.*decisions\.log_tokens = "plain"'):
        Replay(log(LogNames(bytes(range(32)))))
    assert [name for name in policy_names() if reads_token_ids(name)] == ["chwbl"]
