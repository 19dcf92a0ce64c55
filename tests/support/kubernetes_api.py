"""The part of the Kubernetes API that Preble uses, as a real HTTP server on this machine.

What it keeps of the API's contract, and where that is written:

- **Versions.** Each change has a new resource version; a list has one too, and a watch goes on after the one that it
  names (kubernetes.io/docs/reference/using-api/api-concepts, "Efficient detection of changes").
- **Ends of watches.** The server ends a watch after `timeoutSeconds`, or when it likes; so does a test (as above).
- **410 Gone.** A version that is forgotten is answered with a Status of code 410 and reason `Expired`: as an event of
  type ERROR in a watch that has begun with 200, or as HTTP's status (as above, "410 Gone responses";
  k8s.io/apiserver, storage/cacher and registry/rest/watch).
- **Bookmarks.** With `allowWatchBookmarks` events of type BOOKMARK carry a version only (as above, "Watch bookmarks").
- **Writes.** The body is decoded strictly (`fieldValidation=Strict` on the real one, which otherwise only warns of
  unknown fields) and has to fit the schemas of `kubernetes_schemas.py`: else 400. POST of a name that is there: 409
  AlreadyExists. POST with a version: 400. PUT needs the current version, of another one: 409 Conflict (as above,
  "Resource versions"; k8s.io/apiserver, registry/generic/registry/store.go).
- **MicroTime.** `renewTime` and `acquireTime` have six digits behind the point: it is parsed by one layout
  (k8s.io/apimachinery, meta/v1/micro_time.go, `RFC3339Micro`).
- **Tokens.** An unknown or expired bearer token: 401 and a Status `Unauthorized` (as above, and
  kubernetes.io/docs/reference/access-authn-authz/authentication). The body of each error is a Status object with a
  newline behind it.

`tests/kubernetes` runs the same tests against this server and, where one is given, against a real API server. Not kept:
admission, defaults, managed fields, other media types, pages of long lists.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from support.servers import require_server

POOLS = "inference.networking.k8s.io/v1"
KINDS = {
    "pods": ("v1", "Pod"),
    "endpointslices": ("discovery.k8s.io/v1", "EndpointSlice"),
    "leases": ("coordination.k8s.io/v1", "Lease"),
    "inferencepools": (POOLS, "InferencePool"),
}
_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")
_REASONS = {400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired"}


class Refused(Exception):
    """The API answers with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Schemas:
    """Kubernetes' own schemas, asked in their environment. Skips the test where that is not set up."""

    def __init__(self) -> None:
        program = Path(__file__).with_name("kubernetes_schemas.py")
        argv = [require_server("helm", "python"), program]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wrong_with(self, item: Mapping[str, Any]) -> str | None:
        """Return why the API refuses an object, None if it does not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(item) + "\n")
        self._process.stdin.flush()
        answer: str | None = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


class KubernetesApi:
    """Objects of one kind in the namespace `prod`. `lists`, `watches`: the queries of the requests so far."""

    def __init__(self, resource: str) -> None:
        self.resource = resource
        self.objects: dict[str, dict[str, Any]] = {}
        self.lists: list[dict[str, str]] = []
        self.watches: list[dict[str, str]] = []
        self.questions = 0
        self.status = 200
        """What requests are answered with."""
        self.token = "first"
        """What requests have to bear; the kubeconfig's file has it at first."""
        self.answers = asyncio.Event()
        """While it is not set, requests get no answer."""
        self.answers.set()
        self.others_write_first = 0
        """Before so many of the next replacements somebody else writes the object."""
        self.nonsense: bytes | None = None
        """The body of every answer, if there is one."""
        self.watch_status = 200
        """What watches are answered with."""
        self.retry_after = ""
        """The header of errors."""
        self.gone_as_status = False
        self.pieces_of = 1 << 20
        """Events are written in pieces of so many bytes."""
        self.schemas: Schemas | None = None
        """What is written over HTTP has to fit them."""
        self._version = 100
        self.oldest = 100
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
        self.oldest = self._version
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
        self.questions += 1
        await self.answers.wait()
        try:
            if self.status != 200:
                raise Refused(self.status, "no")
            if request.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refused(401, "Unauthorized")
            if self.nonsense is not None:
                return web.Response(body=self.nonsense, content_type="application/json")
            return await self._answer(request)
        except Refused as error:
            return _status(error.code, str(error), self.retry_after)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query, name = dict(request.query), request.match_info.get("name")
        if request.method != "GET":
            return await self._write_object(request, name)
        if name is not None:
            return web.json_response(self._existing(name))
        if query.get("watch") == "true":
            self.watches.append(query)
            if self.watch_status != 200:
                raise Refused(self.watch_status, "no")
            return await self._watch(request, int(query["resourceVersion"]))
        self.lists.append(query)
        version, kind = KINDS[self.resource]
        head = {"apiVersion": version, "kind": f"{kind}List", "metadata": {"resourceVersion": str(self._version)}}
        return web.json_response({**head, "items": list(self.objects.values())})

    def _existing(self, name: str) -> dict[str, Any]:
        if name not in self.objects:
            raise Refused(404, f'{self.resource} "{name}" not found')
        return self.objects[name]

    async def _write_object(self, request: web.Request, name: str | None) -> web.Response:
        if request.method == "DELETE":
            gone = self._existing(str(name))
            await self.delete(str(name))
            return web.json_response(gone)
        item = self._decoded(await request.text())
        version = item["metadata"].get("resourceVersion")
        if request.method == "POST":
            name = item["metadata"]["name"]
            if version is not None:
                raise Refused(400, "resourceVersion should not be set on objects to be created")
            if name in self.objects:
                raise Refused(409, f'{self.resource} "{name}" already exists')
        else:
            if self.others_write_first:
                self.others_write_first -= 1
                await self.put(self._existing(str(name)))
            old = self._existing(str(name))
            if item["metadata"]["name"] != name:
                raise Refused(400, "the name of the object does not match the name on the URL")
            if version != old["metadata"]["resourceVersion"]:
                raise Refused(409, "the object has been modified; please apply your changes to the latest version")
            if request.path.endswith("/status"):
                item = {**old, "status": item["status"]}
        await self.put({**item, "metadata": {"uid": f"uid-{name}", **item["metadata"]}})
        return web.json_response(self.objects[str(name)], status=201 if request.method == "POST" else 200)

    def _decoded(self, body: str) -> dict[str, Any]:
        item: dict[str, Any] = json.loads(body, parse_float=str)
        assert self.schemas is not None, "nothing is written to this API"
        if (item.get("apiVersion"), item.get("kind")) != KINDS[self.resource]:
            raise Refused(400, f"the object provided is unrecognized: {item.get('apiVersion')} {item.get('kind')}")
        if (wrong := self.schemas.wrong_with(item)) is not None:
            raise Refused(400, f"strict decoding error: {wrong}")
        for field in ("acquireTime", "renewTime"):
            if (time := (item.get("spec") or {}).get(field)) is not None and not _MICRO_TIME.fullmatch(time):
                raise Refused(400, f"parsing time {time!r}: it is not like 2006-01-02T15:04:05.000000Z")
        return item

    async def _watch(self, request: web.Request, seen: int) -> web.StreamResponse:
        gone = {"kind": "Status", "metadata": {}, "code": 410, "reason": "Expired", "message": "too old"}
        if seen < self.oldest and self.gone_as_status:
            raise Refused(410, "too old")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if seen < self.oldest:
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


def _status(code: int, message: str, retry_after: str) -> web.Response:
    head = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    text = json.dumps({**head, "message": message, "reason": _REASONS.get(code, "InternalError"), "code": code})
    headers = {"Retry-After": retry_after} if retry_after else {}
    return web.Response(text=text + "\n", status=code, content_type="application/json", headers=headers)


@asynccontextmanager
async def kubernetes_api(
    resource: str,
    folder: Path,
    *,
    writable: bool = False,
    tls: ssl.SSLContext | None = None,
    **others: KubernetesApi,
) -> AsyncIterator[tuple[KubernetesApi, str]]:
    """A running API and the path of a kubeconfig for it. `others`: objects of other kinds, by resource.

    `writable`: over HTTP, too; each object is checked, and the test skips where the schemas are not there.
    """
    apis = {resource: KubernetesApi(resource), **others}
    app = web.Application()
    for name, api in apis.items():
        version, _ = KINDS[name]
        root = f"/{'api' if version == 'v1' else 'apis'}/{version}/namespaces/prod/{name}"
        for path in (root, root + "/{name}", root + "/{name}/status"):
            app.router.add_route("*", path, api.answer)
    schemas = Schemas() if writable else None
    try:
        for api in apis.values():
            api.schemas = schemas
        async with _served(app, folder, tls) as kubeconfig:
            yield apis[resource], kubeconfig
    finally:
        if schemas is not None:
            schemas.close()


@asynccontextmanager
async def _served(app: web.Application, folder: Path, tls: ssl.SSLContext | None) -> AsyncIterator[str]:
    """Serve within the context. Yield the path of a kubeconfig, which names a file `token` beside it."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    port = runner.addresses[0][1]
    token, kubeconfig = folder / "token", folder / "kubeconfig"
    token.write_text("first")
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": f"http{'s' if tls else ''}://127.0.0.1:{port}"}}],
                "users": [{"name": "u", "user": {"tokenFile": str(token)}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    try:
        yield str(kubeconfig)
    finally:
        await runner.cleanup()
