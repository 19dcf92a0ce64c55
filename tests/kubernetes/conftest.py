"""A cluster's API: the stand-in, or the real one that the environment variable PREBLE_TEST_KUBECONFIG names."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from preble.discovery.kubernetes_api import CONFLICT, Api, ApiError, connect
from support.kubernetes_api import KINDS, KubernetesApi, kubernetes_api

REAL = os.environ.get("PREBLE_TEST_KUBECONFIG")


class Cluster:
    """Objects of one namespace, written and read over HTTP as anybody would. `is_real`: an API server has them."""

    def __init__(self, kubeconfig: str, namespace: str, api: Api, *, is_real: bool) -> None:
        self.kubeconfig = kubeconfig
        self.namespace = namespace
        self.is_real = is_real
        self._api = api

    def path(self, resource: str, *rest: str) -> str:
        version, _ = KINDS[resource]
        root = "api" if version == "v1" else "apis"
        return "/".join((f"/{root}/{version}/namespaces/{self.namespace}/{resource}", *rest))

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """As the client does; unknown fields are refused."""
        strict = "?fieldValidation=Strict" if method in ("POST", "PUT") else ""
        return await self._api.ask(method, path + strict, body)

    async def create(self, resource: str, item: dict[str, Any]) -> dict[str, Any]:
        version, kind = KINDS[resource]
        created: dict[str, Any] = await self.ask(
            "POST", self.path(resource), {"apiVersion": version, "kind": kind, **item}
        )
        return created

    async def get(self, resource: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = await self.ask("GET", self.path(resource, name))
        return found

    async def replace(self, resource: str, name: str, **changes: Any) -> None:
        await self.ask("PUT", self.path(resource, name), {**await self.get(resource, name), **changes})

    async def set_status(self, resource: str, name: str, status: dict[str, Any]) -> None:
        path = self.path(resource, name, "status")
        await self.ask("PUT", path, {**await self.get(resource, name), "status": status})

    async def delete(self, resource: str, name: str) -> None:
        await self.ask("DELETE", self.path(resource, name))

    async def refusal(self, method: str, path: str, body: Any = None) -> int:
        """Return the status of an error."""
        with pytest.raises(ApiError) as refused:
            await self.ask(method, path, body)
        return refused.value.status


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    if REAL is None:
        others = {kind: KubernetesApi(kind) for kind in KINDS if kind != "pods"}
        async with (
            kubernetes_api("pods", tmp_path, writable=True, **others) as (_, kubeconfig),
            connect(kubeconfig) as api,
        ):
            yield Cluster(kubeconfig, "prod", api, is_real=False)
        return
    async with connect(REAL) as api:
        name = f"preble-test-{uuid.uuid4().hex[:8]}"
        head = {"apiVersion": "v1", "metadata": {"name": name}}
        await api.ask("POST", "/api/v1/namespaces", {**head, "kind": "Namespace"})
        try:
            account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
            try:  # pods need it, and a bare API server has nobody who makes it
                await api.ask("POST", f"/api/v1/namespaces/{name}/serviceaccounts", account)
            except ApiError as error:
                assert error.status == CONFLICT
            yield Cluster(REAL, name, api, is_real=True)
        finally:
            with suppress(ApiError):
                await api.ask("DELETE", f"/api/v1/namespaces/{name}")
