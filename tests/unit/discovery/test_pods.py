"""Which members EndpointSlices and pods name. The objects are as the Kubernetes API sends them, shortened."""

from __future__ import annotations

from typing import Any

import pytest

from preble.config import GroupConfig
from preble.core.types import Role
from preble.discovery.pods import NOT_READY, TERMINATING, members_of_pods, members_of_slices

SERVICE = GroupConfig(service="vllm", port="http")
PODS = GroupConfig(pods="app=vllm", engine="vllm")


def endpoint(address: str, uid: str | None = None, **conditions: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"addresses": [address], "conditions": conditions}
    if uid is not None:
        found["targetRef"] = {"kind": "Pod", "name": f"pod-{uid}", "uid": uid}
    return found


def endpoint_slice(*endpoints: dict[str, Any], kind: str = "IPv4", ports: Any = None) -> dict[str, Any]:
    ports = [{"name": "metrics", "port": 9090}, {"name": "http", "port": 8000}] if ports is None else ports
    return {"metadata": {"name": "vllm-abc"}, "addressType": kind, "ports": ports, "endpoints": list(endpoints)}


def pod(address: str | None, uid: str = "u", **changes: Any) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True"}
    return {
        "metadata": {"name": f"pod-{uid}", "uid": uid, **changes.pop("metadata", {})},
        "spec": {"containers": [{"ports": [{"name": "http", "containerPort": 8000}]}]},
        "status": {"podIP": address, "phase": "Running", "conditions": [ready], **changes},
    }


def urls(named: Any) -> list[str]:
    return [member.url for member in named.members]


def test_each_endpoint_of_all_slices_is_a_member_at_the_named_port() -> None:
    named = members_of_slices([endpoint_slice(endpoint("10.0.0.2")), endpoint_slice(endpoint("10.0.0.1"))], SERVICE)
    assert (urls(named), named.problems) == (["http://10.0.0.1:8000", "http://10.0.0.2:8000"], ())


def test_without_a_port_the_first_one_counts_and_a_number_is_taken_as_it_is() -> None:
    one = endpoint_slice(endpoint("10.0.0.1"))
    assert urls(members_of_slices([one], GroupConfig(service="vllm"))) == ["http://10.0.0.1:9090"]
    assert urls(members_of_slices([one], GroupConfig(service="vllm", port=1234))) == ["http://10.0.0.1:1234"]
    assert urls(members_of_slices([one], GroupConfig(service="vllm", port="1234"))) == ["http://10.0.0.1:1234"]


def test_conditions_that_are_not_said_mean_ready() -> None:
    listed = endpoint_slice(
        endpoint("10.0.0.1"),
        endpoint("10.0.0.2", ready=True),
        endpoint("10.0.0.3", ready=False),
        endpoint("10.0.0.4", ready=False, serving=True, terminating=True),
    )
    held_back = [member.held_back for member in members_of_slices([listed], SERVICE).members]
    assert held_back == [None, None, NOT_READY, TERMINATING]


def test_a_pod_in_two_slices_is_one_member_the_ready_one() -> None:
    slices = [endpoint_slice(endpoint("10.0.0.1", "u", ready=False)), endpoint_slice(endpoint("10.0.0.1", "u"))]
    for order in (slices, slices[::-1]):
        [member] = members_of_slices(order, SERVICE).members
        assert (member.incarnation, member.held_back) == ("u", None)


def test_a_pod_with_addresses_of_both_families_is_one_member_at_its_ipv4_address() -> None:
    slices = [endpoint_slice(endpoint("fd00::1", "u"), kind="IPv6"), endpoint_slice(endpoint("10.0.0.1", "u"))]
    assert urls(members_of_slices(slices, SERVICE)) == ["http://10.0.0.1:8000"]
    assert urls(members_of_slices(slices[:1], SERVICE)) == ["http://[fd00::1]:8000"]


def test_a_slice_without_the_port_is_reported_and_the_others_count() -> None:
    slices = [
        endpoint_slice(endpoint("10.0.0.1"), ports=[{"name": "web", "port": 80}]),
        endpoint_slice(endpoint("10.0.0.2")),
    ]
    named = members_of_slices(slices, SERVICE)
    assert urls(named) == ["http://10.0.0.2:8000"]
    assert named.problems == ("slice vllm-abc: no port 'http'; there are: 'web'",)


def test_a_slice_without_endpoints_is_no_problem() -> None:
    empty = {"metadata": {"name": "x"}, "addressType": "IPv4", "ports": None, "endpoints": None}
    assert members_of_slices([empty], SERVICE)[:2] == ((), ())


def test_a_pod_is_a_member_from_its_address_to_its_end() -> None:
    unready = {"conditions": [{"type": "Ready", "status": "False"}]}
    pods = [
        pod(None, "pending"),
        pod("10.0.0.2", "unready", **unready),
        pod("10.0.0.3", "ready"),
        pod("10.0.0.4", "going", metadata={"deletionTimestamp": "2026-11-22T11:00:00Z"}),
        pod("10.0.0.5", "ended", phase="Succeeded"),
    ]
    members = members_of_pods(pods, PODS).members
    assert {member.incarnation: member.held_back for member in members} == {
        "unready": NOT_READY,
        "ready": None,
        "going": TERMINATING,
    }


def test_a_pods_annotations_go_before_the_groups_settings() -> None:
    annotations = {
        "preble/engine": "sglang",
        "preble/port": "30000",
        "preble/kv-events-port": "5557",
        "preble/kv-events-replay-port": "5558",
        "preble/kv-events-topic": "kv",
        "other/thing": "x",
    }
    [member] = members_of_pods([pod("10.0.0.1", metadata={"annotations": annotations})], PODS).members
    replica = member.replica
    assert (replica.url, replica.engine, replica.kv_events_topic) == ("http://10.0.0.1:30000", "sglang", "kv")
    assert (replica.kv_events, replica.kv_events_replay) == ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")


@pytest.mark.parametrize("port", ["many", "0", "65536", "000001" + 5000 * "9", "\u0663"])
def test_a_pod_with_a_wrong_annotation_is_reported_and_the_others_count(port: str) -> None:
    wrong = pod("10.0.0.1", "bad", metadata={"annotations": {"preble/kv-events-port": port}})
    named = members_of_pods([wrong, pod("10.0.0.2", "good")], PODS)
    assert urls(named) == ["http://10.0.0.2:8000"]
    assert named.problems == (f"pod pod-bad: annotation preble/kv-events-port={port[:50]!r} is no port",)


def role_of(labels: dict[str, str], **settings: Any) -> Role | None:
    group = GroupConfig(pods="app=vllm", **settings)
    [member] = members_of_pods([pod("10.0.0.1", metadata={"labels": labels})], group).members
    return member.replica.role


@pytest.mark.parametrize("label", ["preble/role", "llm-d.ai/role", "nvidia.com/dynamo-sub-component-type", "role-name"])
def test_a_pods_role_is_the_one_of_its_label_whoever_has_set_it(label: str) -> None:
    roles = {value: role_of({label: value}) for value in ("prefill", "decode", "both", "prefill-decode")}
    assert roles == {"prefill": "prefill", "decode": "decode", "both": "mixed", "prefill-decode": "mixed"}


def test_what_others_call_a_role_and_is_none_says_nothing() -> None:
    assert role_of({"role-name": "worker", "llm-d.ai/role": "encode", "component": "decode"}) is None


def test_a_label_of_ones_own_goes_before_those_of_others_and_preble_before_both() -> None:
    labels = {"component": "decode", "llm-d.ai/role": "prefill"}
    assert role_of(labels, role_label="component", role=Role.MIXED) is Role.DECODE
    assert role_of({**labels, "preble/role": "mixed"}, role_label="component") is Role.MIXED
    assert role_of({}, role_label="component", role=Role.PREFILL) is Role.PREFILL


def test_a_label_of_ones_own_that_says_no_role_is_reported_unless_another_counts_before_it() -> None:
    labels = {"component": "worker", "llm-d.ai/role": "encode"}
    for more, settings, found in (
        ({}, {"role_label": "component"}, [("http://10.0.0.1:8000", "component", "worker")]),
        ({"component": "decode"}, {"role_label": "component"}, []),
        ({"preble/role": "decode"}, {"role_label": "component"}, []),
        ({}, {}, []),
        ({}, {"role_label": "not there"}, []),
    ):
        group = GroupConfig(pods="app=vllm", **settings)
        named = members_of_pods([pod("10.0.0.1", metadata={"labels": {**labels, **more}})], group)
        assert [tuple(unknown) for unknown in named.unknown_roles] == found
        assert named.members and not named.problems, "it is a member all the same"


def test_a_pod_with_a_role_that_is_none_is_reported() -> None:
    named = members_of_pods([pod("10.0.0.1", "bad", metadata={"labels": {"preble/role": "encode"}})], PODS)
    assert named.problems == ("pod pod-bad: preble/role='encode' is no role; there are: mixed, prefill, decode",)


def test_a_pods_transfer_group_is_in_a_label_too() -> None:
    own = {"preble/transfer-group": "b"}
    for label, labels, found in (("zone", {}, "a"), ("zone", own, "b"), ("", own, "b"), ("other", {}, "c")):
        group = GroupConfig(pods="app=vllm", transfer_group="c", transfer_group_label=label)
        [member] = members_of_pods([pod("10.0.0.1", metadata={"labels": {"zone": "a", **labels}})], group).members
        assert member.replica.transfer_group == found


def test_a_pod_that_takes_over_an_address_is_another_replica() -> None:
    [before] = members_of_pods([pod("10.0.0.1", "old")], PODS).members
    [after] = members_of_pods([pod("10.0.0.1", "new")], PODS).members
    assert before.url == after.url and not before.is_same_replica(after)
