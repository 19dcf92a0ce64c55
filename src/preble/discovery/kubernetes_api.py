"""Objects of the Kubernetes API: listed, then watched.

The API server ends every watch now and then, and forgets old versions (410 Gone); then the watch goes on from the
version it had reached, or the list is read anew. Objects that have changed meanwhile show as a difference of sets.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes_asyncio import config as kubernetes_config
from kubernetes_asyncio.client import ApiClient, ApiException, Configuration
from kubernetes_asyncio.config import ConfigException

from preble.discovery.pods import Object

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_WATCH_S = 240
"""How long the server is asked to let a watch last; a connection that has died unnoticed is found by then."""
_LIST_S = 30.0
_GRACE_S = 30.0
_GONE = 410
FAILURES = (ApiException, ConfigException, aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError)
"""What a cluster that cannot be reached, or answers nonsense, makes the functions here raise."""
Listing = Callable[..., Awaitable[Any]]
"""A list call of the Kubernetes client with its namespace and selector, which lists or watches."""


class Gone(Exception):
    """The server no longer knows the version that the watch had reached."""


class Objects:
    """The objects of one kind as the API reports them, and their version. Pure."""

    def __init__(self, listed: Mapping[str, Any]) -> None:
        self.version: str = listed["metadata"]["resourceVersion"]
        self._by_name: dict[str, Object] = {_name(item): item for item in listed.get("items") or ()}

    def __iter__(self) -> Iterator[Object]:
        return iter(self._by_name.values())

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take in an event of the watch. Raises: Gone. ValueError: the server reports an error."""
        kind, item = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            if item.get("code") == _GONE:
                raise Gone
            raise ValueError(f"the Kubernetes API ends the watch: {item.get('message') or item.get('reason')}")
        if kind in ("ADDED", "MODIFIED"):
            self._by_name[_name(item)] = item
        elif kind == "DELETED":
            self._by_name.pop(_name(item), None)
        elif kind != "BOOKMARK":
            raise ValueError(f"the Kubernetes API sends an unknown event: {str(kind)[:50]}")
        self.version = item["metadata"]["resourceVersion"]


async def followed(listing: Listing) -> AsyncGenerator[Objects]:
    """Yield the objects after the list and after each change. Raises: Gone, and `FAILURES`."""
    async with asyncio.timeout(_LIST_S), await _ask(listing) as response:
        objects = Objects(await response.json())
    yield objects
    while True:
        began_at = asyncio.get_running_loop().time()
        options = {"watch": True, "resource_version": objects.version, "allow_watch_bookmarks": True}
        response = await _ask(listing, timeout_seconds=_WATCH_S, **options)
        async with response:
            async for event in _events(response):
                objects.apply(event)
                if event["type"] != "BOOKMARK":
                    yield objects
        if asyncio.get_running_loop().time() < began_at + 1.0:
            await asyncio.sleep(1.0)  # a proxy that ends every watch at once must not be asked in a loop


async def _ask(listing: Listing, **options: Any) -> aiohttp.ClientResponse:
    timeout = aiohttp.ClientTimeout(total=_WATCH_S + _GRACE_S, sock_connect=_LIST_S)
    response: Any = await listing(**options, _preload_content=False, _request_timeout=timeout)
    if response.status == _GONE:
        response.close()
        raise Gone
    if response.status != 200:
        text = (await response.text())[:200]
        raise ApiException(status=response.status, reason=text)
    found: aiohttp.ClientResponse = response
    return found


async def connect(kubeconfig: str | None) -> ApiClient:
    """Return a client of the cluster that this pod runs in; outside one, or with `kubeconfig`, of the file's cluster.

    Raises: ConfigException: nothing says where the API is.
    """
    settings = Configuration()
    if kubeconfig is None:
        try:
            kubernetes_config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            return ApiClient(settings)
        except ConfigException:
            pass
    file = _kubeconfig(kubeconfig)
    await kubernetes_config.load_kube_config(file, client_configuration=settings, persist_config=False)
    return ApiClient(settings)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the JSON lines of a watch, however long they are."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.strip():
                yield json.loads(line)


def _name(item: Object) -> str:
    return str(item["metadata"]["name"])


def _kubeconfig(given: str | None) -> str:
    """Raises: ConfigException: there is no such file."""
    file = given or os.environ.get("KUBECONFIG", "~/.kube/config")
    if not any(Path(part).expanduser().is_file() for part in file.split(os.pathsep)):
        raise ConfigException(f"found neither a service account nor the file {file!r}; set discovery.kubeconfig")
    return file


def own_namespace() -> str:
    """Return the namespace of the pod that this process is in; outside a cluster, `default`."""
    return _NAMESPACE_FILE.read_text(encoding="utf-8").strip() if _NAMESPACE_FILE.is_file() else "default"


def plain(error: BaseException) -> BaseException:
    """Return the same error in one line: what the API answered without its headers."""
    if isinstance(error, ApiException):
        return ValueError(f"the Kubernetes API answers {error.status}: {error.reason}")
    return error
