"""The part of the Kubernetes API that lists and watches, as a real HTTP server on this machine.

It keeps the API's contract: each change has a new resource version, a watch goes on after the version that it names, a
version that is forgotten is answered with 410 Gone (as an event, or as the status), bookmarks move a watch on without a
change, and the server ends watches when it likes. Objects and events have the shape of those that a cluster sends.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

POOLS = "inference.networking.k8s.io/v1"
KINDS = {
    "pods": ("v1", "Pod"),
    "endpointslices": ("discovery.k8s.io/v1", "EndpointSlice"),
    "inferencepools": (POOLS, "InferencePool"),
}


class KubernetesApi:
    """Objects of one kind in the namespace `prod`. `lists`, `watches`: the queries of the requests so far."""

    def __init__(self, resource: str) -> None:
        self.resource = resource
        self.objects: dict[str, dict[str, Any]] = {}
        self.lists: list[dict[str, str]] = []
        self.watches: list[dict[str, str]] = []
        self.status = 200
        """What requests are answered with."""
        self.gone_as_status = False
        self.pieces_of = 1 << 20
        """Events are written in pieces of so many bytes."""
        self._version = 100
        self._oldest = 100
        """Watches from before this version are answered with 410 Gone."""
        self._history: list[tuple[int, dict[str, Any]]] = []
        self._changed = asyncio.Condition()
        self._epoch = 0

    async def put(self, item: dict[str, Any]) -> None:
        """Create or change an object."""
        name = item["metadata"]["name"]
        await self._note("MODIFIED" if name in self.objects else "ADDED", item)

    async def delete(self, name: str) -> None:
        await self._note("DELETED", self.objects[name])

    async def bookmark(self) -> None:
        """Move every watch on, as the API does when other objects have changed."""
        await self._note("BOOKMARK", {"metadata": {"name": ""}})

    async def fail(self, code: int, reason: str) -> None:
        """Send an error in every watch."""
        await self._note("ERROR", {"kind": "Status", "metadata": {}, "code": code, "reason": reason, "message": reason})

    async def forget(self) -> None:
        """Forget all versions but the current one, and end all watches."""
        self._oldest = self._version
        await self.end_watches()

    async def end_watches(self) -> None:
        self._epoch += 1
        async with self._changed:
            self._changed.notify_all()

    async def _note(self, kind: str, item: dict[str, Any]) -> None:
        self._version += 1
        item = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self._version)}}
        if kind in ("ADDED", "MODIFIED"):
            self.objects[item["metadata"]["name"]] = item
        elif kind == "DELETED":
            del self.objects[item["metadata"]["name"]]
        async with self._changed:
            self._history.append((self._version, {"type": kind, "object": item}))
            self._changed.notify_all()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        if self.status != 200:
            return web.json_response({"kind": "Status", "message": "no"}, status=self.status)
        if query.get("watch") != "True":
            self.lists.append(query)
            version, kind = KINDS[self.resource]
            head = {"apiVersion": version, "kind": f"{kind}List", "metadata": {"resourceVersion": str(self._version)}}
            return web.json_response({**head, "items": list(self.objects.values())})
        self.watches.append(query)
        return await self._watch(request, int(query["resourceVersion"]))

    async def _watch(self, request: web.Request, seen: int) -> web.StreamResponse:
        gone = {"kind": "Status", "metadata": {}, "code": 410, "reason": "Expired", "message": "too old"}
        if seen < self._oldest and self.gone_as_status:
            return web.json_response(gone, status=410)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if seen < self._oldest:
            await self._write(response, {"type": "ERROR", "object": gone})
            return response
        epoch = self._epoch
        while epoch == self._epoch:
            new = [(version, event) for version, event in self._history if version > seen]
            for version, event in new:
                await self._write(response, event)
                seen = version
            async with self._changed:
                if epoch == self._epoch and self._version == seen:
                    await self._changed.wait()
        return response

    async def _write(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        line = json.dumps(event).encode() + b"\n"
        for start in range(0, len(line), self.pieces_of):
            await response.write(line[start : start + self.pieces_of])


class Leases:
    """Leases of the namespace `prod`: read, created, replaced if nobody else has meanwhile, and patched."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.status = 200
        """What requests are answered with."""
        self.questions = 0
        self._version = 0

    @property
    def holder(self) -> str | None:
        return self.lease["spec"].get("holderIdentity") if self.lease else None

    async def answer(self, request: web.Request) -> web.Response:
        self.questions += 1
        if self.status != 200:
            return self._refused(self.status)
        if request.method == "GET":
            return self._refused(404) if self.lease is None else web.json_response(self.lease)
        body = await request.json()
        if request.method == "PATCH" and self.lease is not None:
            metadata = self.lease["metadata"] | body["metadata"]
            body = {**self.lease, "metadata": metadata, "spec": self.lease["spec"] | body["spec"]}
        if (body["metadata"].get("resourceVersion") or "0") != str(self._version):
            return self._refused(409)
        self._version += 1
        self.lease = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self._version)}}
        return web.json_response(self.lease, status=201 if request.method == "POST" else 200)

    @staticmethod
    def _refused(status: int) -> web.Response:
        return web.json_response({"kind": "Status", "code": status, "message": "no"}, status=status)


@asynccontextmanager
async def kubernetes_api(
    resource: str, folder: Path, **others: KubernetesApi
) -> AsyncIterator[tuple[KubernetesApi, str]]:
    """A running API and the path of a kubeconfig for it. `others`: objects of other kinds, by resource."""
    api = KubernetesApi(resource)
    app = web.Application()
    for name, objects in {resource: api, **others}.items():
        for root in ("/api/v1", "/apis/discovery.k8s.io/v1", f"/apis/{POOLS}"):
            app.router.add_get(f"{root}/namespaces/prod/{name}", objects.answer)
    async with _served(app, folder) as kubeconfig:
        yield api, kubeconfig


@asynccontextmanager
async def leases_api(folder: Path) -> AsyncIterator[tuple[Leases, str]]:
    """A running API that has leases, and the path of a kubeconfig for it."""
    leases = Leases()
    app = web.Application()
    root = "/apis/coordination.k8s.io/v1/namespaces/prod/leases"
    app.router.add_post(root, leases.answer)
    app.router.add_route("*", root + "/{name}", leases.answer)
    async with _served(app, folder) as kubeconfig:
        yield leases, kubeconfig


@asynccontextmanager
async def _served(app: web.Application, folder: Path) -> AsyncIterator[str]:
    """Serve within the context. Yield the path of a kubeconfig."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    try:
        yield str(kubeconfig)
    finally:
        await runner.cleanup()
