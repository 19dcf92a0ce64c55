"""EndpointSlices and pods followed through the real client, against a server that lists and watches as the API does.

No cluster was used: see support/kubernetes_api.py for what the server keeps of the API's contract.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import structlog

from preble.background import Backoff
from preble.config import DiscoveryConfig, GroupConfig
from preble.discovery import Source, make_source
from preble.discovery import kubernetes_api as kubernetes_api_room
from preble.discovery.kubernetes import KubernetesSource
from preble.discovery.kubernetes_api import ApiError, Objects, connect
from preble.discovery.pods import TERMINATING
from preble.discovery.source import LONGEST_WAIT_S
from support.kubernetes_api import KubernetesApi, kubernetes_api
from support.members import followed
from support.waiting import eventually

PODS = GroupConfig(pods="app=vllm", namespace="prod", port="http")
SERVICE = GroupConfig(service="vllm", namespace="prod", port="http")


def source(kubeconfig: str, group: GroupConfig = PODS) -> Source:
    return make_source(group, DiscoveryConfig(kubeconfig=kubeconfig))


def pod(name: str, address: str, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", **metadata},
        "spec": {"containers": [{"ports": [{"name": "http", "containerPort": 8000}]}]},
        "status": {"podIP": address, "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


def endpoint_slice(name: str, *addresses: str) -> dict[str, Any]:
    endpoints = [{"addresses": [address], "conditions": {"ready": True}} for address in addresses]
    head = {"metadata": {"name": name}, "addressType": "IPv4", "ports": [{"name": "http", "port": 8000}]}
    return {**head, "endpoints": endpoints}


def pool(labels: dict[str, str], *ports: int) -> dict[str, Any]:
    spec = {"selector": {"matchLabels": labels}, "targetPorts": [{"number": port} for port in ports]}
    return {"metadata": {"name": "llama"}, "spec": spec}


def at(*hosts: int) -> list[str]:
    return [f"http://10.0.0.{host}:8000" for host in hosts]


async def test_pods_are_listed_then_watched(tmp_path: Path) -> None:
    async with kubernetes_api("pods", tmp_path) as (api, kubeconfig):
        await api.put(pod("a", "10.0.0.1"))
        async with followed(source(kubeconfig)) as found:
            await eventually(lambda: found.urls == at(1))
            await api.put(pod("b", "10.0.0.2"))
            await eventually(lambda: found.urls == at(1, 2))
            await api.put(pod("a", "10.0.0.1", deletionTimestamp="2026-11-22T11:00:00Z"))
            await eventually(lambda: [member.held_back for member in found.sets[-1]] == [TERMINATING, None])
            await api.delete("a")
            await eventually(lambda: found.urls == at(2))
        assert [query["labelSelector"] for query in (*api.lists, *api.watches)] == ["app=vllm"] * 2
        [watch] = api.watches
        assert (watch["resourceVersion"], watch["allowWatchBookmarks"]) == ("101", "true")


async def test_a_role_label_with_an_unknown_value_is_told_once_for_each_replica_until_it_is_another_one(
    tmp_path: Path,
) -> None:
    group = GroupConfig(pods="app=vllm", namespace="prod", port="http", role_label="component")
    async with kubernetes_api("pods", tmp_path) as (api, kubeconfig):
        with structlog.testing.capture_logs() as logs:
            async with followed(source(kubeconfig, group)) as found:
                steps = (("a", 1, "worker"), ("b", 2, "decode"), ("c", 3, "worker"), ("a", 4, "helper"))
                for number, (name, host, role) in enumerate(steps, 1):
                    await api.put(pod(name, f"10.0.0.{host}", labels={"component": role}))
                    await eventually(lambda number=number: len(found.sets) >= number and found.urls[-1:] == at(number))
        told = [log for log in logs if log["event"] == "role_unknown"]
        assert [(log["replica"], log["label"], log["value"]) for log in told] == [
            (at(1)[0], "component", "worker"),
            (at(3)[0], "component", "worker"),
            (at(4)[0], "component", "helper"),
        ]
        assert {"prefill", "decode", "mixed"} <= set(told[0]["allowed"])


async def test_all_slices_of_a_service_count(tmp_path: Path) -> None:
    async with kubernetes_api("endpointslices", tmp_path) as (api, kubeconfig):
        await api.put(endpoint_slice("vllm-x", "10.0.0.1"))
        await api.put(endpoint_slice("vllm-y", "10.0.0.2"))
        async with followed(source(kubeconfig, SERVICE)) as found:
            await eventually(lambda: found.urls == at(1, 2))
            await api.put(endpoint_slice("vllm-y", "10.0.0.2", "10.0.0.3"))
            await eventually(lambda: found.urls == at(1, 2, 3))
            await api.delete("vllm-x")
            await eventually(lambda: found.urls == at(2, 3))
        assert api.lists[0]["labelSelector"] == "kubernetes.io/service-name=vllm"


async def test_a_watch_that_ends_goes_on_from_the_version_that_it_had_reached(tmp_path: Path) -> None:
    async with kubernetes_api("pods", tmp_path) as (api, kubeconfig):
        async with followed(source(kubeconfig)) as found:
            await eventually(lambda: len(api.watches) == 1)
            await api.put(pod("a", "10.0.0.1"))
            await api.bookmark()
            await eventually(lambda: found.urls == at(1))
            await api.end_watches()
            await eventually(lambda: len(api.watches) == 2)
            await api.put(pod("b", "10.0.0.2"))
            await eventually(lambda: found.urls == at(1, 2))
        assert len(api.lists) == 1, "nothing is listed anew"
        assert api.watches[1]["resourceVersion"] == "102", "the bookmark's"


@pytest.mark.parametrize("as_status", [False, True])
async def test_versions_that_the_api_has_forgotten_are_listed_anew_and_what_was_missed_is_seen(
    tmp_path: Path, as_status: bool
) -> None:
    async with kubernetes_api("pods", tmp_path) as (api, kubeconfig):
        api.gone_as_status = as_status
        await api.put(pod("a", "10.0.0.1"))
        async with followed(source(kubeconfig)) as found:
            await eventually(lambda: len(api.watches) == 1)
            api.status = 503  # nobody hears of the changes
            await api.end_watches()
            await api.delete("a")
            await api.put(pod("b", "10.0.0.2"))
            await api.forget()
            api.status = 200
            await eventually(lambda: found.urls == at(2))
            await eventually(lambda: found.source.error is None)
        assert len(api.lists) >= 2


async def test_an_api_that_is_down_changes_nothing_and_is_asked_again(tmp_path: Path) -> None:
    async with kubernetes_api("pods", tmp_path) as (api, kubeconfig):
        await api.put(pod("a", "10.0.0.1"))
        async with followed(source(kubeconfig)) as found:
            await eventually(lambda: len(api.watches) == 1)
            api.status = 403
            await api.end_watches()
            await eventually(lambda: found.source.error is not None)
            assert "the Kubernetes API answers 403" in str(found.source.error)
            assert found.sets == [found.sets[0]]
            api.status = 200
            await api.put(pod("b", "10.0.0.2"))
            await eventually(lambda: found.urls == at(1, 2))
            assert found.source.error is None


@pytest.mark.parametrize(
    "nonsense",
    [
        *(b'{"metadata": {"resource', b"[]", 5000 * b"["),
        b'{"metadata": {"resourceVersion": "1"}, "items": ["pod"]}',
        b'{"metadata": {"resourceVersion": "1"}, "items": [{"metadata": {"name": "a"}, "status": "up"}]}',
    ],
)
async def test_an_answer_that_is_nonsense_changes_nothing_and_is_told(nonsense: bytes, tmp_path: Path) -> None:
    async with kubernetes_api("pods", tmp_path) as (api, kubeconfig), followed(source(kubeconfig)) as found:
        await api.put(pod("a", "10.0.0.1"))
        await eventually(lambda: found.urls == at(1))
        api.nonsense = nonsense
        await api.end_watches()
        await eventually(lambda: found.source.error is not None)
        assert found.urls == at(1)
        api.nonsense = None
        await eventually(lambda: found.source.error is None)


@pytest.mark.parametrize("refused", ["403", "410", "410 in the watch"])
async def test_an_api_that_lists_but_lets_nobody_watch_is_asked_less_and_less_and_told_of_once(
    tmp_path: Path, refused: str
) -> None:
    async with kubernetes_api("pods", tmp_path) as (api, kubeconfig):
        await api.put(pod("a", "10.0.0.1"))
        if refused.startswith("410"):
            api.gone_as_status = refused == "410"
            api.oldest = 1000
        else:
            api.watch_status = 403
        asking = source(kubeconfig)
        asking._backoff = Backoff(0.01, 30.0, rng=None)
        with structlog.testing.capture_logs() as logs:
            async with followed(asking) as found:
                await eventually(lambda: len(api.lists) == 6)
                await eventually(lambda: asking._backoff._wait_s >= 0.01 * 2**4)
                assert found.urls == at(1) and refused[:3] in str(asking.error)
                api.watch_status, api.oldest, before = 200, 0, len(api.watches)
                await eventually(lambda: len(api.watches) > before)
                await api.bookmark()
                await eventually(lambda: asking.error is None)
        told = [log["event"] for log in logs]
        # At first the watch alone could have failed; and that a version is old is no failure.
        assert told == ["members_unknown", "members_known_again"] * (2 if refused == "403" else 1)


async def test_an_api_that_asks_for_time_gets_it_within_bounds(tmp_path: Path) -> None:
    async with kubernetes_api("pods", tmp_path) as (api, kubeconfig):
        api.status, api.retry_after = 429, "20"
        async with connect(kubeconfig) as asked:
            with pytest.raises(ApiError) as busy:
                await asked.ask("GET", "/api/v1/namespaces/prod/pods")
    asking = KubernetesSource("", PODS, DiscoveryConfig())
    assert asking._wait_s(busy.value) == 20.0
    assert asking._wait_s(ApiError("busy", 429, 1e9)) == LONGEST_WAIT_S
    assert asking._wait_s(ApiError("busy", 429)) < 5.0


def test_a_part_of_a_list_is_not_taken_for_all_of_it() -> None:
    with pytest.raises(ApiError, match="a part of the list"):
        Objects({"metadata": {"resourceVersion": "1", "continue": "next"}, "items": []})


async def test_an_answer_or_a_number_of_objects_above_the_bounds_changes_nothing_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api_room, "_MOST_OBJECTS", 2)  # ships 20,000
    monkeypatch.setattr(kubernetes_api_room, "_MOST_BYTES", 100_000)  # ships 64 MiB
    async with kubernetes_api("pods", tmp_path) as (api, kubeconfig), followed(source(kubeconfig)) as found:
        for host in (1, 2):
            await api.put(pod(f"{host}", f"10.0.0.{host}"))
        await eventually(lambda: found.urls == at(1, 2))
        await api.put(pod("3", "10.0.0.3"))
        await eventually(lambda: found.source.error == "the Kubernetes API names more than 2 objects")
        api.nonsense = b" " * 100_001
        await eventually(lambda: found.source.error == "the Kubernetes API answers with more than 100,000 bytes")
        assert found.urls == at(1, 2)
        api.nonsense = None
        await api.delete("1")
        await eventually(lambda: found.urls == at(2, 3))


async def test_an_error_within_a_watch_is_survived(tmp_path: Path) -> None:
    async with kubernetes_api("pods", tmp_path) as (api, kubeconfig), followed(source(kubeconfig)) as found:
        await eventually(lambda: len(api.watches) == 1)
        await api.fail(500, "etcd leader changed")
        await eventually(lambda: len(api.lists) == 2)
        await api.put(pod("a", "10.0.0.1"))
        await eventually(lambda: found.urls == at(1))


async def test_events_are_read_however_large_they_are_and_however_they_are_cut(tmp_path: Path) -> None:
    async with kubernetes_api("pods", tmp_path) as (api, kubeconfig), followed(source(kubeconfig)) as found:
        await eventually(lambda: len(api.watches) == 1)
        await api.put(pod("a", "10.0.0.1", annotations={"note": "x" * 300_000}))
        await eventually(lambda: found.urls == at(1))
        api.pieces_of = 7
        await api.put(pod("b", "10.0.0.2"))
        await eventually(lambda: found.urls == at(1, 2))


async def test_changes_that_concern_no_member_are_not_told(tmp_path: Path) -> None:
    async with kubernetes_api("pods", tmp_path) as (api, kubeconfig), followed(source(kubeconfig)) as found:
        await eventually(lambda: len(api.watches) == 1)
        await api.put(pod("a", "10.0.0.1"))
        await api.put(pod("a", "10.0.0.1", annotations={"note": "x"}))
        await api.put(pod("b", "10.0.0.2"))
        await eventually(lambda: found.urls == at(1, 2))
        assert found.sets[0] == () and len(found.sets) == 3


async def test_errors_of_the_api_are_one_sentence(tmp_path: Path) -> None:
    async with kubernetes_api("pods", tmp_path) as (api, kubeconfig), followed(source(kubeconfig)) as found:
        await eventually(lambda: len(api.watches) == 1)
        api.token = "another"
        await api.end_watches()
        await eventually(lambda: found.source.error is not None)
        assert found.source.error == f"the user of the kubeconfig {kubeconfig} was refused (401)"
        (tmp_path / "token").write_text("another")
        api.status = 403
        await eventually(lambda: "403" in str(found.source.error))
        assert found.source.error == "the Kubernetes API answers 403: no"


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "cannot be used"), ("[]", "cannot be used"), ("current-context: x", "cannot be used"), (None, "neither")],
)
async def test_a_kubeconfig_that_is_no_good_is_named(text: str | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "config"
    if text is not None:
        file.write_text(text)
    async with followed(source(str(file))) as found:
        await eventually(lambda: found.source.error is not None)
        assert says in str(found.source.error) and "\n" not in str(found.source.error)


async def test_without_a_cluster_or_a_kubeconfig_the_source_says_so(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ):
        os.environ.pop("KUBERNETES_SERVICE_HOST", None)
        async with followed(source(str(tmp_path / "missing"))) as found:
            await eventually(lambda: found.source.error is not None)
            assert found.sets == [] and "missing" in str(found.source.error)


async def test_the_pods_of_a_pool_are_followed_and_so_is_the_pool(tmp_path: Path) -> None:
    pools = KubernetesApi("inferencepools")
    async with kubernetes_api("pods", tmp_path, inferencepools=pools) as (pods, kubeconfig):
        group = GroupConfig(pool="llama", namespace="prod")
        async with followed(source(kubeconfig, group)) as found:
            await eventually(lambda: found.urls == [] and found.source.error is not None)
            assert "there is no pool 'llama'" in str(found.source.error)
            await pods.put(pod("a", "10.0.0.1"))
            await pools.put(pool({"app": "vllm", "model": "llama"}, 8000))
            await eventually(lambda: found.urls == at(1))
            assert found.source.error is None and found.sets[-1][0].incarnation == "uid-a"
            await pods.put(pod("b", "10.0.0.2"))
            await eventually(lambda: found.urls == at(1, 2))
            await pools.put(pool({"app": "sglang"}, 8000, 8001))
            expected = [f"http://10.0.0.{host}:{port}" for port in (8000, 8001) for host in (1, 2)]
            await eventually(lambda: found.urls == expected)
        assert [query["labelSelector"] for query in pods.lists] == ["app=vllm,model=llama", "app=sglang"]
        assert pools.lists[0]["fieldSelector"] == "metadata.name=llama"


async def test_a_pool_that_is_made_again_within_the_grace_time_loses_no_member(tmp_path: Path) -> None:
    pools = KubernetesApi("inferencepools")
    async with kubernetes_api("pods", tmp_path, inferencepools=pools) as (pods, kubeconfig):
        await pools.put(pool({"app": "vllm"}, 8000))
        for number in (1, 2):
            await pods.put(pod(str(number), f"10.0.0.{number}"))
        async with followed(source(kubeconfig, GroupConfig(pool="llama", namespace="prod"))) as found:
            await eventually(lambda: found.urls == at(1, 2))
            await pools.delete("llama")
            await eventually(lambda: found.source.error is not None)
            await pods.delete("2")
            await eventually(lambda: found.urls == at(1))  # pods are followed meanwhile
            lists = len(pods.lists)
            await pools.fail(500, "etcd leader changed")  # so that all is listed anew
            await eventually(lambda: len(pods.lists) > lists)
            await pools.put(pool({"app": "vllm"}, 8000))
            await eventually(lambda: found.source.error is None)
            assert [len(members) for members in found.sets] == [2, 1], "each of the two was there until its pod went"


async def test_a_service_that_is_made_again_within_the_grace_time_loses_no_member(tmp_path: Path) -> None:
    async with kubernetes_api("endpointslices", tmp_path) as (api, kubeconfig):
        await api.put(endpoint_slice("vllm-x", "10.0.0.1"))
        async with followed(source(kubeconfig, SERVICE)) as found:
            await eventually(lambda: found.urls == at(1))
            await api.delete("vllm-x")
            await eventually(lambda: found.source.error is not None)
            assert "there is no service 'vllm'" in str(found.source.error)
            await api.put(endpoint_slice("vllm-y", "10.0.0.1"))
            await eventually(lambda: found.source.error is None)
            await api.put(endpoint_slice("vllm-y"))
            await eventually(lambda: found.urls == [])  # a service with no endpoint has no replica
            assert len(found.sets) == 2


@pytest.mark.parametrize("kind", ["pool", "service"])
async def test_after_the_grace_time_what_was_deleted_has_no_members(kind: str, tmp_path: Path) -> None:
    """The time is shortened: it is 300 s by default."""
    pools, slices = KubernetesApi("inferencepools"), KubernetesApi("endpointslices")
    async with kubernetes_api("pods", tmp_path, inferencepools=pools, endpointslices=slices) as (pods, kubeconfig):
        await pods.put(pod("a", "10.0.0.1"))
        await pools.put(pool({"app": "vllm"}, 8000))
        await slices.put(endpoint_slice("vllm-x", "10.0.0.1"))
        group = SERVICE if kind == "service" else GroupConfig(pool="llama", namespace="prod")
        settings = DiscoveryConfig(kubeconfig=kubeconfig, missing_grace_s=0.5)
        async with followed(make_source(group, settings)) as found:
            await eventually(lambda: found.urls == at(1))
            await (slices.delete("vllm-x") if kind == "service" else pools.delete("llama"))
            await eventually(lambda: found.urls == [])
            assert found.source.error is not None and f"there is no {kind}" in found.source.error
            assert "its replicas were kept for 0.5 s" in found.source.error


async def test_a_pool_goes_on_when_the_api_forgets_versions(tmp_path: Path) -> None:
    pools = KubernetesApi("inferencepools")
    async with kubernetes_api("pods", tmp_path, inferencepools=pools) as (pods, kubeconfig):
        await pools.put(pool({"app": "vllm"}, 8000))
        async with followed(source(kubeconfig, GroupConfig(pool="llama", namespace="prod"))) as found:
            await eventually(lambda: len(pods.watches) == 1)
            await pods.put(pod("a", "10.0.0.1"))
            await eventually(lambda: found.urls == at(1))
            for api in (pods, pools):
                await api.forget()
            await pods.put(pod("b", "10.0.0.2"))
            await eventually(lambda: found.urls == at(1, 2))
