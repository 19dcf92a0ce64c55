"""Who wins where the configuration, discovery and operators want different things."""

from __future__ import annotations

import pytest

from preble.config import ReplicaConfig
from preble.discovery import Member
from preble.serving.replicas.wanted import DRAINED_BY_HAND, Conflict, UnknownReplica, WantedReplicas

A, B = "http://a:1", "http://b:1"


def member(url: str, engine: str = "vllm", held_back: str | None = None) -> Member:
    return Member(ReplicaConfig(url, engine), held_back=held_back)


@pytest.fixture
def wanted() -> WantedReplicas:
    found = WantedReplicas()
    found.set("configuration", [member(A)])
    return found


def test_of_two_sources_the_first_counts(wanted: WantedReplicas) -> None:
    wanted.set("dns b", [member(A, "sglang"), member(B, "sglang")])
    assert {url: m.replica.engine for url, m in wanted.merged().items()} == {A: "vllm", B: "sglang"}
    assert (wanted.source_of(A), wanted.source_of(B)) == ("configuration", "dns b")


def test_what_one_source_drops_another_still_wants(wanted: WantedReplicas) -> None:
    wanted.set("dns b", [member(A, "sglang")])
    wanted.set("configuration", [])
    assert wanted.merged()[A].replica.engine == "sglang"
    wanted.forget("dns b")
    assert wanted.merged() == {}


def test_adding_twice_changes_nothing_the_second_time(wanted: WantedReplicas) -> None:
    assert wanted.add(ReplicaConfig(B, "vllm")) is True
    before = wanted.merged()
    assert wanted.add(ReplicaConfig(B, "vllm")) is False
    assert wanted.merged() == before and wanted.source_of(B) == "api"


def test_an_operator_may_change_what_he_added_but_not_what_a_source_names(wanted: WantedReplicas) -> None:
    wanted.add(ReplicaConfig(B, "vllm"))
    wanted.add(ReplicaConfig(B, "sglang"))
    assert wanted.merged()[B].replica.engine == "sglang"
    with pytest.raises(Conflict, match="names http://a:1 with other settings"):
        wanted.add(ReplicaConfig(A, "sglang"))


def test_the_file_wins_over_an_operator_and_leaves_him_his_replica_when_it_drops_it(wanted: WantedReplicas) -> None:
    wanted.add(ReplicaConfig(B, "vllm"))
    wanted.set("configuration", [member(A), member(B, "sglang")])
    assert wanted.merged()[B].replica.engine == "sglang"
    wanted.set("configuration", [member(A)])
    assert wanted.merged()[B].replica.engine == "vllm"


def test_a_drain_by_hand_outlives_what_sources_say_until_it_is_undone(wanted: WantedReplicas) -> None:
    wanted.drain(A)
    wanted.set("configuration", [member(A), member(B)])
    assert wanted.merged()[A].held_back == DRAINED_BY_HAND
    wanted.undrain(A)
    assert wanted.merged()[A].held_back is None


def test_a_removal_by_hand_holds_until_the_replica_is_added_again(wanted: WantedReplicas) -> None:
    wanted.remove(A)
    wanted.set("configuration", [member(A)])
    assert wanted.merged() == {}
    assert wanted.add(ReplicaConfig(A, "vllm")) is True
    assert wanted.source_of(A) == "configuration" and A in wanted.merged()


def test_a_removal_by_hand_is_forgotten_once_no_source_names_the_replica(wanted: WantedReplicas) -> None:
    wanted.remove(A)
    wanted.set("configuration", [])
    wanted.set("configuration", [member(A)])
    assert A in wanted.merged()


def test_a_drain_by_hand_ends_with_the_replica(wanted: WantedReplicas) -> None:
    wanted.drain(A)
    wanted.set("configuration", [])
    wanted.set("configuration", [member(A)])
    assert wanted.merged()[A].held_back is None


@pytest.mark.parametrize("act", ["drain", "undrain", "remove"])
def test_nobody_drains_or_removes_what_is_not_there(wanted: WantedReplicas, act: str) -> None:
    with pytest.raises(UnknownReplica, match="there is no replica 'http://b:1'"):
        getattr(wanted, act)(B)
    wanted.remove(A)
    with pytest.raises(UnknownReplica):
        getattr(wanted, act)(A)


def test_of_two_pods_at_one_address_the_ready_one_counts(wanted: WantedReplicas) -> None:
    for pods in ([member(B), member(B, held_back="gone")], [member(B, held_back="gone"), member(B)]):
        wanted.set("pods", pods)
        assert wanted.merged()[B].held_back is None
