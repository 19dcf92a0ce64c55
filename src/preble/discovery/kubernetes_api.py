"""Objects of the Kubernetes API: asked for, written, or listed and then watched.

The API server ends every watch now and then, and forgets old versions (410 Gone); then the watch goes on from the
version it had reached, or the list is read anew. Objects that have changed meanwhile show as a difference of sets.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import msgspec
import yaml
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import SERVICE_ACCOUNT, KubeConfig, SingleConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError as UnusableConfig

from preble import background
from preble.discovery.pods import Object
from preble.errors import ConfigError

_NAMESPACE_FILE = Path(SERVICE_ACCOUNT) / "namespace"
_ANSWER_S = 30.0
"""How long a connection, or an answer that is no watch, may take."""
_WATCH_S = 240
"""How long the server is asked to let a watch last."""
_SILENCE_S = _WATCH_S + 30.0
"""The longest silence of a watch: by then the server would have ended it, so the connection has died unnoticed."""
_EVENT_BYTES = 16 << 20
"""The longest event of a watch. etcd takes no object above 1.5 MB."""
_MOST_BYTES = 64 << 20
"""The longest answer that is no watch: a list of some thousands of pods."""
_MOST_OBJECTS = 20_000
"""Of one kind that a source follows."""
_REASON_CHARS = 200
GONE, NOT_FOUND, CONFLICT, _REFUSED = 410, 404, 409, 401


class ApiError(Exception):
    """The API answers with an error, or not at all; its text is one sentence. `status`: HTTP's, 0 without an answer.
    `retry_after_s`: how long it wants not to be asked."""

    def __init__(self, text: str, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(" ".join(text.split()))
        self.status = status
        self.retry_after_s = retry_after_s


class Gone(Exception):
    """The server no longer knows the version that the watch had reached."""

    def __init__(self) -> None:
        super().__init__("the Kubernetes API forgets each version at once (410)")


FAILURES = (
    *(ApiError, ConfigError, UnusableConfig, OSError, TimeoutError),
    *(AttributeError, LookupError, TypeError, ValueError),
)
"""What a cluster that cannot be reached, or answers nonsense, makes the functions here raise."""


_UNUSABLE = (
    *(UnusableConfig, yaml.YAMLError, msgspec.MsgspecError),
    *(AttributeError, LookupError, TypeError, ValueError, OSError),
)
"""What a kubeconfig of another form makes the library raise."""


class Listing(NamedTuple):
    """What to list: a path of the API, and which of its objects."""

    path: str
    selector: Mapping[str, str]


class Objects:
    """The objects of one kind as the API reports them, and their version. Pure."""

    def __init__(self, listed: Mapping[str, Any]) -> None:
        if listed["metadata"].get("continue"):
            raise ApiError("the Kubernetes API answers with a part of the list, though asked for all of it")
        self.version: str = listed["metadata"]["resourceVersion"]
        self._by_name: dict[str, Object] = {_name(item): item for item in listed.get("items") or ()}
        self._check_number()

    def __iter__(self) -> Iterator[Object]:
        return iter(self._by_name.values())

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take in an event of the watch. Raises: Gone. ValueError: the server reports an error."""
        kind, item = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            if item.get("code") == GONE:
                raise Gone
            raise ValueError(f"the Kubernetes API ends the watch: {item.get('message') or item.get('reason')}")
        if kind in ("ADDED", "MODIFIED"):
            self._by_name[_name(item)] = item
            self._check_number()
        elif kind == "DELETED":
            self._by_name.pop(_name(item), None)
        elif kind != "BOOKMARK":
            raise ValueError(f"the Kubernetes API sends an unknown event: {str(kind)[:50]}")
        self.version = item["metadata"]["resourceVersion"]

    def _check_number(self) -> None:
        if len(self._by_name) > _MOST_OBJECTS:
            raise ValueError(f"the Kubernetes API names more than {_MOST_OBJECTS:,} objects")


class Api:
    """A cluster's API: JSON out, JSON in. `account`: who asks, as errors name it."""

    def __init__(self, http: httpx2.AsyncClient, account: str) -> None:
        self._http = http
        self._account = account

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the decoded answer. Raises: `FAILURES`."""
        with self._as_one_sentence():
            async with (
                background.time_limit(_ANSWER_S),
                self._http.stream(method, path, json=body) as response,
            ):
                content = await _content(response)
        if not response.is_success:
            raise _error(response, content, self._account)
        return _object(content)

    async def followed(self, listing: Listing) -> AsyncGenerator[Objects]:
        """Yield the objects after the list, after each event and after each watch. Raises: Gone, and `FAILURES`."""
        path, selector = listing
        objects = Objects(await self.ask("GET", f"{path}?{httpx2.QueryParams(selector)}"))
        loop = asyncio.get_running_loop()
        while True:
            yield objects  # also when a watch has ended in good order: it has missed nothing
            began_at = loop.time()
            query = {"watch": "true", "resourceVersion": objects.version, "allowWatchBookmarks": "true"}
            with self._as_one_sentence():
                async with self._watch(path, {**selector, **query, "timeoutSeconds": str(_WATCH_S)}) as events:
                    async for event in events:
                        objects.apply(event)
                        yield objects
            if loop.time() < began_at + 1.0:
                await asyncio.sleep(1.0)  # a proxy that ends every watch at once must not be asked in a loop

    @asynccontextmanager
    async def _watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[AsyncIterator[Mapping[str, Any]]]:
        timeout = httpx2.Timeout(_ANSWER_S, read=_SILENCE_S)
        async with self._http.stream("GET", path, params=query, timeout=timeout) as response:
            if not response.is_success:
                content = await _content(response)
                raise Gone if response.status_code == GONE else _error(response, content, self._account)
            yield _events(response)

    @contextmanager
    def _as_one_sentence(self) -> Iterator[None]:
        try:
            yield
        except (httpx2.HTTPError, TimeoutError) as error:
            is_late = isinstance(error, httpx2.TimeoutException | TimeoutError)
            reason = "no answer in time" if is_late else str(error) or type(error).__name__
            raise ApiError(f"the Kubernetes API at {self._http.base_url.netloc.decode()} fails: {reason}") from error


async def _content(response: httpx2.Response) -> bytes:
    """Return the body. Raises: ApiError: it is too long."""
    content = bytearray()
    async for piece in response.aiter_bytes():
        content += piece
        if len(content) > _MOST_BYTES:
            raise ApiError(f"the Kubernetes API answers with more than {_MOST_BYTES:,} bytes")
    return bytes(content)


def _error(response: httpx2.Response, content: bytes, account: str) -> ApiError:
    status = response.status_code
    if status == _REFUSED:
        return ApiError(f"{account} was refused (401)", status)
    try:
        reason = json.loads(content)["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        reason = response.reason_phrase
    wanted = response.headers.get("Retry-After", "")
    retry_after_s = float(wanted) if wanted.isdecimal() else 0.0
    return ApiError(f"the Kubernetes API answers {status}: {reason}"[:_REASON_CHARS], status, retry_after_s)


@asynccontextmanager
async def connect(kubeconfig: str | None, service_account: str = SERVICE_ACCOUNT) -> AsyncIterator[Api]:
    """Speak to the cluster that this pod runs in; outside one, or with `kubeconfig`, to the file's cluster.

    A service account's token is read again when it is refused: Kubernetes renews it within the hour.
    Raises: ConfigError: nothing usable says where the API is.
    """
    try:
        cluster, account = _cluster(kubeconfig, service_account)
        user = cluster.user or User()
        http = AsyncClient(cluster._replace(user=user), ConnectionParams(trust_env=False))
    except _UNUSABLE as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"what says where the Kubernetes API is cannot be used: {reason}") from error
    async with http:
        yield Api(http, account)


def _cluster(kubeconfig: str | None, service_account: str) -> tuple[SingleConfig, str]:
    """Return where the API is, and who asks."""
    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ and Path(service_account, "token").is_file():
        found = KubeConfig.from_service_account(service_account)
        account = "the service account's token"
    else:
        file = _kubeconfig(kubeconfig)
        found = KubeConfig.from_file(file)
        account = f"the user of the kubeconfig {file}"
    cluster = found.get()
    assert cluster is not None  # without a context, `get` raises
    return cluster, account


async def _events(response: httpx2.Response) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the JSON lines of a watch. Raises: ApiError: a line is no JSON object. ValueError: it is too long."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _EVENT_BYTES:
            raise ValueError(f"the Kubernetes API sends an event above {_EVENT_BYTES:,} bytes")
        for line in lines:
            if line.strip():
                yield _object(line)
    if rest.strip():  # what is no watch at all, such as a proxy's page, must not be asked again and again unheard
        yield _object(rest)


def _object(text: bytes) -> Mapping[str, Any]:
    """Return a decoded JSON object. Raises: ApiError: it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError("the Kubernetes API answers with what is no JSON object")
    return found


def _name(item: Object) -> str:
    return str(item["metadata"]["name"])


def _kubeconfig(given: str | None) -> str:
    """Return the first file that exists, of one or of a list as `KUBECONFIG` has. Raises: UnusableConfig: none does."""
    files = (given or os.environ.get("KUBECONFIG", "~/.kube/config")).split(os.pathsep)
    for file in files:
        if Path(file).expanduser().is_file():
            return file
    raise UnusableConfig(f"there is neither a service account nor the file {files[0]!r}; set discovery.kubeconfig")


def own_namespace() -> str:
    """Return the namespace of the pod that this process is in; outside a cluster, `default`."""
    return _NAMESPACE_FILE.read_text(encoding="utf-8").strip() if _NAMESPACE_FILE.is_file() else "default"
