"""How many front-end processes a gateway starts by default."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from preble.config import GatewayConfig, ReplicaConfig
from preble.gateway.workers.count import num_front_ends, usable_cores


@pytest.fixture
def no_quota(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path, tmp_path / "cgroup"


def limited(groups: Path, group: str, quota: str) -> tuple[Path, Path]:
    """A control group with a limit, and this process in it."""
    (groups / group).mkdir(parents=True, exist_ok=True)
    (groups / group / "cpu.max").write_text(quota)
    (groups / "cgroup").write_text(f"1:cpu:/elsewhere\n0::/{group}\n")
    return groups, groups / "cgroup"


@pytest.mark.parametrize(("cores", "expected"), [(1, 0), (2, 1), (4, 3), (5, 4), (64, 4)])
def test_a_front_end_for_each_core_beside_the_schedulers_but_at_most_four(
    monkeypatch: pytest.MonkeyPatch, no_quota: tuple[Path, Path], cores: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert num_front_ends(GatewayConfig(), *no_quota) == expected


@pytest.mark.parametrize("workers", [0, 7])
def test_the_setting_counts_before_the_cores(no_quota: tuple[Path, Path], workers: int) -> None:
    assert num_front_ends(GatewayConfig(workers=workers), *no_quota) == workers


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("200000 100000\n", 2), ("150000 100000", 2), ("10000 100000", 1), ("max 100000", 8), ("?", 8)],
)
def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert usable_cores(*limited(tmp_path, "", quota)) == expected


@pytest.mark.parametrize(("outer", "own", "expected"), [("max", "150000", 2), ("300000", "600000", 3), ("?", "max", 8)])
def test_the_limit_of_a_systemd_unit_and_of_the_groups_around_it_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outer: str, own: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    limited(tmp_path, "system.slice", f"{outer} 100000")
    assert usable_cores(*limited(tmp_path, "system.slice/preble.service", f"{own} 100000")) == expected


@pytest.mark.parametrize(
    "config",
    [
        GatewayConfig(engine="my_engines:Mine"),
        GatewayConfig(replicas=(ReplicaConfig("http://a"), ReplicaConfig("http://b", engine="my_engines:Mine"))),
    ],
)
def test_an_adapter_of_the_users_own_gets_one_process(
    monkeypatch: pytest.MonkeyPatch, no_quota: tuple[Path, Path], config: GatewayConfig
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert num_front_ends(config, *no_quota) == 0
