"""Members as a cluster's API names them, and what that API refuses: the stand-in and a real one alike.

No real one forgets versions (410 Gone) on demand: `tests/discovery/test_kubernetes.py` has the stand-in do it.
"""

from __future__ import annotations

from typing import Any

import pytest

from kubernetes.conftest import Cluster
from preble.config import DiscoveryConfig, GroupConfig
from preble.discovery import Source, make_source
from preble.discovery.kubernetes_api import CONFLICT, NOT_FOUND, ApiError
from preble.discovery.pods import NOT_READY
from support.members import Followed, followed
from support.waiting import eventually

POD = {
    "metadata": {"name": "vllm-0", "labels": {"app": "vllm"}},
    "spec": {
        "schedulingGates": [{"name": "preble.test/nowhere"}],  # no node takes it: the test plays its kubelet
        "containers": [{"name": "vllm", "image": "vllm", "ports": [{"name": "http", "containerPort": 8000}]}],
    },
}
SLICE = {
    "metadata": {"name": "vllm-x", "labels": {"kubernetes.io/service-name": "vllm"}},
    "addressType": "IPv4",
    "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
    "endpoints": [{"addresses": ["10.1.2.3"], "conditions": {"ready": True}}],
}
POOL = {
    "metadata": {"name": "llama"},
    "spec": {
        "selector": {"matchLabels": {"app": "vllm"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": "preble-epp", "port": {"number": 9002}},
    },
}
LEASE: dict[str, Any] = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "epp"}}


def source(cluster: Cluster, **group: Any) -> Source:
    settings = DiscoveryConfig(kubeconfig=cluster.kubeconfig)
    return make_source(GroupConfig(namespace=cluster.namespace, **group), settings)


def running(ready: bool) -> dict[str, Any]:
    condition = {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": "2026-11-25T10:00:00Z"}
    return {"phase": "Running", "podIP": "10.1.2.3", "podIPs": [{"ip": "10.1.2.3"}], "conditions": [condition]}


def held_back(found: Followed) -> list[str | None]:
    return [member.held_back for member in found.sets[-1]] if found.sets else []


async def test_a_pod_is_a_member_from_its_address_on_and_serves_once_it_is_ready(cluster: Cluster) -> None:
    async with followed(source(cluster, pods="app=vllm")) as found:
        await eventually(lambda: found.urls == [])
        created = await cluster.create("pods", POD)
        await cluster.set_status("pods", "vllm-0", running(ready=False))
        await eventually(lambda: held_back(found) == [NOT_READY])
        await cluster.set_status("pods", "vllm-0", running(ready=True))
        await eventually(lambda: held_back(found) == [None])
        assert found.urls == ["http://10.1.2.3:8000"]
        assert found.sets[-1][0].incarnation == created["metadata"]["uid"]
        await cluster.delete("pods", "vllm-0")
        await eventually(lambda: found.urls == [])
        assert found.source.error is None


async def test_the_endpoints_of_a_service_are_members(cluster: Cluster) -> None:
    async with followed(source(cluster, service="vllm", port="http")) as found:
        await cluster.create("endpointslices", SLICE)
        await eventually(lambda: found.urls == ["http://10.1.2.3:8000"])
        two = [{"addresses": [f"10.1.2.{host}"], "conditions": {"ready": True}} for host in (3, 4)]
        await cluster.replace("endpointslices", "vllm-x", endpoints=two)
        await eventually(lambda: found.urls == ["http://10.1.2.3:8000", "http://10.1.2.4:8000"])


async def test_a_pool_that_is_made_again_keeps_its_members(cluster: Cluster) -> None:
    try:
        await cluster.create("inferencepools", POOL)
    except ApiError as error:
        assert cluster.is_real and error.status == NOT_FOUND, error
        pytest.skip("this API has no InferencePools")
    await cluster.create("pods", POD)
    await cluster.set_status("pods", "vllm-0", running(ready=True))
    async with followed(source(cluster, pool="llama")) as found:
        await eventually(lambda: found.urls == ["http://10.1.2.3:8000"])
        await cluster.delete("inferencepools", "llama")
        await eventually(lambda: found.source.error is not None)
        await cluster.create("inferencepools", POOL)
        await eventually(lambda: found.source.error is None)
        assert len(found.sets) == 1, "no member was ever missing"


async def test_the_api_refuses_what_does_not_fit_its_schema(cluster: Cluster) -> None:
    leases = cluster.path("leases")
    for spec in (
        {"leaseDurationSeconds": 15.5},
        {"leaseDurationSeconds": "15"},
        {"holder": "a"},
        {"renewTime": "2026-11-25T10:00:00Z"},
        {"renewTime": "2026-11-25 10:00:00.000000"},
    ):
        assert await cluster.refusal("POST", leases, {**LEASE, "spec": spec}) == 400, spec
    await cluster.ask("POST", leases, {**LEASE, "spec": {"renewTime": "2026-11-25T10:00:00.000000Z"}})


async def test_the_api_refuses_a_write_over_a_version_that_has_passed(cluster: Cluster) -> None:
    leases, epp = cluster.path("leases"), cluster.path("leases", "epp")
    assert await cluster.refusal("GET", epp) == NOT_FOUND
    first = await cluster.ask("POST", leases, {**LEASE, "spec": {"holderIdentity": "a"}})
    assert await cluster.refusal("POST", leases, {**LEASE, "spec": {"holderIdentity": "b"}}) == CONFLICT
    await cluster.ask("PUT", epp, {**first, "spec": {"holderIdentity": "b"}})
    assert await cluster.refusal("PUT", epp, {**first, "spec": {"holderIdentity": "c"}}) == CONFLICT
    assert (await cluster.get("leases", "epp"))["spec"]["holderIdentity"] == "b"
