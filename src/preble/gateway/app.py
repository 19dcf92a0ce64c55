"""The ASGI application: routes, API keys, and an answer in the endpoint's form for every failure."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import structlog

import preble
from preble.config import GatewayConfig
from preble.errors import PrebleError, UnknownModel
from preble.gateway.http.asgi_client import AsgiClient, ClientGone, Receive, Send
from preble.gateway.http.body_memory import BodyMemoryBudget
from preble.gateway.http.keys import NOBODY, UNAUTHORIZED, KeyRing
from preble.gateway.http.refusals import FORBIDDEN, NO_ADMINS, STOPPING
from preble.gateway.pages.debug import DEBUG, PARITY, DebugPages
from preble.gateway.pages.live import UI, UI_EVENTS, UI_PICTURE, LivePage
from preble.gateway.pages.replicas import DRAIN, REPLICAS, UNDRAIN, ReplicaPages
from preble.gateway.requests.json_requests import JsonRequests
from preble.gateway.requests.placed_client import IntakeSettings, PlacedClient
from preble.gateway.requests.stored import STORED, answer_stored
from preble.gateway.requests.uploads import Uploads, is_upload
from preble.serving import (
    ENDPOINTS,
    JSON_TYPE,
    METRICS_CONTENT_TYPE,
    OTHER,
    Caller,
    ErrorForm,
    HeaderList,
    LiveReplica,
    Serving,
    endpoint_of,
    error_form,
)
from preble.wire.answering import ClientConnection, RequestHead

Handler = Callable[[AsgiClient], Awaitable[None]]

_MODELS = "/v1/models"
_METRICS = "/metrics"
PATHS = (
    *("/v1/models", "/health", "/healthz", "/livez", "/ping", "/ready", "/readyz", "/version", "/metrics"),
    *(REPLICAS, DRAIN, UNDRAIN),
)
"""The paths that this application answers itself, besides `DEBUG`."""
PROBES = (b"/health", b"/healthz", b"/livez", b"/ping", b"/ready", b"/readyz")
"""What load balancers and supervisors ask, and get answered however many connections there are."""
READY = frozenset({"/ready", "/readyz"})
_ADDRESS = re.compile(r"https?://\S+")
_GONE = 499
"""The status that metrics show for clients that went away; no client sees it."""
_BODIES_HELD = 16
"""How many bodies of the largest size fit into the memory budget."""
_LARGEST_REPLICA_BYTES = 64 * 1024


class App:
    """Answers every request. One instance serves all connections of one event loop."""

    num_processes = 1
    """How many processes share the memory for bodies."""

    def __init__(self, config: GatewayConfig, serving: Serving) -> None:
        self.bodies = BodyMemoryBudget(0, retry_after_s=0)
        self._serving = serving
        self._classes = config.queue.classes
        self._use(config, KeyRing(config.auth, self._classes))
        self._debug = DebugPages(serving)
        self._replicas = ReplicaPages(serving)
        self._live = LivePage(self._take_picture)
        self._log = structlog.get_logger()
        serving.telemetry.numbers.read(lambda: [("preble_body_bytes", (), [float(self.bodies.held)])])
        self.is_draining = False
        """Whether the gateway is about to stop: it is not ready, and connections end with their answers."""
        self._started_at = int(time.time())
        self._gets: Mapping[str, Handler] = {
            _MODELS: self._models,
            **dict.fromkeys(("/health", "/healthz", "/livez", "/ping"), self._health),
            **dict.fromkeys(READY, self._ready),
            "/version": self._version,
            _METRICS: self._metrics,
            UI: self._live.page,
            UI_EVENTS: self._watch,
            UI_PICTURE: self._live.picture,
        }

    def reconfigure(self, config: GatewayConfig) -> int:
        """Use other settings from now on, and read the file of keys again. Return the number of keys.

        Raises: ConfigError: a setting or the file is unusable; then nothing has changed.
        """
        keys = KeyRing(config.auth, self._classes)
        self._serving.reconfigure(config)
        self._use(config, keys)
        return keys.num_keys

    def _use(self, config: GatewayConfig, keys: KeyRing) -> None:
        self._limits = config.limits
        self._body_s = config.timeouts.body_s
        held = max(1, _BODIES_HELD // self.num_processes)
        self.bodies.configure(held * config.limits.max_body_bytes, retry_after_s=config.limits.retry_after_s)
        self.keys = keys
        self._for_admins = (
            DEBUG,
            REPLICAS,
            UI_EVENTS,
            UI_PICTURE,
            *((_METRICS,) if config.auth.metrics_need_key else ()),
        )
        self._uploads = Uploads(self._serving, config)
        answer = JsonRequests(self._serving, config).answer
        self._intake = IntakeSettings(answer, keys, config.limits, config.timeouts.body_s, self.bodies, self)

    def accept(self, connection: ClientConnection, head: RequestHead) -> PlacedClient | None:
        """Return what serves a POST by callbacks, None if the request is not to be placed."""
        if head.path in self._gets or head.path.startswith((DEBUG, REPLICAS, STORED)):
            return None
        endpoint = endpoint_of(head.path)
        if endpoint is None or is_upload(endpoint, head.headers):
            return None
        return PlacedClient(self._intake, endpoint, connection, head)

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        client = AsgiClient(scope["headers"], receive, send, query=scope["query_string"])
        client.is_last = lambda: self.is_draining
        path: str = scope["path"]
        # A second cancellation, at the server's very end, meets a client that does not read the error.
        with contextlib.suppress(asyncio.CancelledError):
            await self._answer(scope["method"], path, client)
        self.count(path, client.status)

    def count(self, path: str, status: int | None) -> None:
        """An answer is complete."""
        self.bodies.collect()
        self._serving.telemetry.responded(self._counted_as(path), status)

    async def _answer(self, method: str, path: str, client: AsgiClient) -> None:
        """Every failure becomes an answer here."""
        try:
            await self._route(method, path, client)
        except ClientGone:
            client.status = _GONE
        except asyncio.CancelledError:
            # Only the server cancels this task, at the end of the shutdown's grace; the task ends here.
            await client.fail(STOPPING)
        except Exception as error:  # noqa: BLE001 (the task's root: a failure must not reach the client as a traceback)
            await client.fail(self.form_of(error, client.caller, client.request_id))

    def _counted_as(self, path: str) -> str:
        """Return the path as metrics name it: one of few."""
        if path.startswith(DEBUG):
            return DEBUG
        if path.startswith(REPLICAS):
            return REPLICAS
        endpoint = endpoint_of(path)
        return path if path in self._gets else endpoint.counted_as if endpoint is not None else OTHER

    def form_of(self, error: Exception, caller: Caller, request_id: str | None) -> ErrorForm:
        """Return the answer for an error. Logs the error unless it is the client's."""
        form = error_form(error if isinstance(error, PrebleError) else PrebleError())
        if not caller.is_admin:
            form = self._without_addresses(form)
        if form.status >= 500:
            is_bug = form.code == "internal_error"
            self._log.error(
                "request_failed",
                request_id=request_id,
                error=str(error),
                code=form.code,
                exc_info=error if is_bug else None,
            )
        return form

    def _without_addresses(self, form: ErrorForm) -> ErrorForm:
        """Return the error without the names of replicas, which are addresses."""
        message = form.message
        for replica_id in sorted(self._serving.replicas, key=len, reverse=True):
            message = message.replace(replica_id, "(address withheld)")
        return msgspec.structs.replace(form, message=_ADDRESS.sub("(address withheld)", message))

    async def _is_let_in(self, path: str, client: AsgiClient) -> bool:
        """Find out who sends the request; refuse it if he may not."""
        needs_admin = path.startswith(self._for_admins)
        if not needs_admin and ((path != _MODELS and path in self._gets) or endpoint_of(path) is None):
            return True
        caller = self.keys.caller(client.headers)
        if caller is None:
            client.caller = NOBODY
            await client.reply(401, [JSON_TYPE, (b"www-authenticate", b"Bearer")], UNAUTHORIZED.body(client.errors))
            return False
        client.caller = caller
        if needs_admin and not caller.is_admin:
            await client.reply(403, FORBIDDEN.headers(), FORBIDDEN.body())
            return False
        return True

    async def _route(self, method: str, path: str, client: AsgiClient) -> None:
        endpoint = endpoint_of(path)
        if endpoint is not None:
            client.errors = endpoint.errors
        if not await self._is_let_in(path, client):
            return
        if path in self._gets or path.startswith(DEBUG):
            await self._answer_page(method, path, client)
        elif path in (REPLICAS, DRAIN, UNDRAIN):
            await self._answer_replicas(method, path, client)
        elif path.startswith(STORED):
            await answer_stored(client, self._serving, method, path)
        elif path.startswith(_MODELS + "/") and method in ("GET", "HEAD"):
            await self._model(client, path.removeprefix(_MODELS + "/"))
        elif endpoint is not None and method == "POST":
            with self.bodies.share() as share:
                await self._uploads.answer(endpoint, client, share)
        elif path in ENDPOINTS:
            await self._not_allowed(client, method, b"POST")
        else:
            there = ", ".join((*ENDPOINTS, *self._gets))
            text = f"there is no {method} {path[:200]}; there are {there}, {REPLICAS} and pages below {DEBUG}"
            form = ErrorForm(404, "invalid_request_error", "not_found", text)
            await client.reply(404, form.headers(), form.body(client.errors))

    async def _answer_page(self, method: str, path: str, client: AsgiClient) -> None:
        if path == PARITY and method == "POST":
            await self._debug.check_parity(client)
        elif method not in ("GET", "HEAD"):
            await self._not_allowed(client, method, b"GET, HEAD, POST" if path == PARITY else b"GET, HEAD")
        elif (handler := self._gets.get(path)) is not None:
            await handler(client)
        else:
            await self._debug.answer(path, client)

    async def _answer_replicas(self, method: str, path: str, client: AsgiClient) -> None:
        if path == REPLICAS and method in ("GET", "HEAD"):
            await self._replicas.list(client)
        elif method not in (("POST", "DELETE") if path == REPLICAS else ("POST",)):
            await self._not_allowed(client, method, b"GET, HEAD, POST, DELETE" if path == REPLICAS else b"POST")
        elif not self.keys.has_keys:
            # Else any page in a browser on this machine could have prompts sent to a replica of its own.
            await client.reply(403, NO_ADMINS.headers(), NO_ADMINS.body())
        elif path != REPLICAS:
            await self._replicas.drain(path, client)
        elif method == "DELETE":
            await self._replicas.remove(client)
        else:
            with self.bodies.share() as share:
                body = await client.read_body(_LARGEST_REPLICA_BYTES, self._body_s, share)
            await self._replicas.add(client, body)

    async def _not_allowed(self, client: AsgiClient, method: str, allowed: bytes) -> None:
        text = f"{method} is not allowed here; use {allowed.decode()}"
        form = ErrorForm(405, "invalid_request_error", "method_not_allowed", text)
        await client.reply(405, [*form.headers(), (b"allow", allowed)], form.body(client.errors))

    async def _take_picture(self, client: AsgiClient) -> bytes:
        """What the live page shows, for an admin."""
        return msgspec.json.encode(self._serving.picture())

    async def _watch(self, client: AsgiClient) -> None:
        """The live page's events, for as long as the key is valid and the gateway runs."""

        def goes_on() -> bool:
            caller = self.keys.caller(client.headers)
            return not self.is_draining and caller is not None and caller.is_admin

        await self._live.watch(client, goes_on)

    async def _models(self, client: AsgiClient) -> None:
        """The models that the live replicas serve."""
        data = [self._card(name, replica) for name, replica in sorted(self._serving.replicas.models().items())]
        await client.reply(200, [JSON_TYPE], msgspec.json.encode({"object": "list", "data": data}))

    async def _model(self, client: AsgiClient, name: str) -> None:
        """One model. Raises: UnknownModel."""
        models = self._serving.replicas.models()
        if name not in models:
            raise UnknownModel(f"no replica serves the model {name[:200]!r}; {_MODELS} lists those that are served")
        await client.reply(200, [JSON_TYPE], msgspec.json.encode(self._card(name, models[name])))

    def _card(self, name: str, replica: LiveReplica) -> dict[str, Any]:
        info = replica.info
        roots = dict(zip(info.models, info.roots, strict=False))
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": info.engine,
            "root": roots.get(name, name),
            "parent": info.models[0] if name in info.adapters else None,
            "max_model_len": info.max_model_len,
        }

    async def _version(self, client: AsgiClient) -> None:
        await client.reply(200, [JSON_TYPE], msgspec.json.encode({"version": preble.__version__}))

    async def _health(self, client: AsgiClient) -> None:
        await client.reply(200, [JSON_TYPE], b'{"status":"ok"}')

    async def _ready(self, client: AsgiClient) -> None:
        live = self._serving.replicas.values()
        untrusted = sum(not replica.trusted for replica in live)
        status = self._serving.waits_for or "ready"
        if self.is_draining:
            status = "draining"
        rows = list(self._serving.members)
        page = {
            "status": status,
            "replicas": len(live),
            "configured": len(rows),
            "untrusted": untrusted,
            "states": Counter(row.state for row in rows),
        }
        caller = self.keys.caller(client.headers)
        if caller is not None and caller.is_admin:
            page["members"] = {row.url: {"state": row.state, "last_error": row.last_error} for row in rows}
        await client.reply(200 if status == "ready" else 503, [JSON_TYPE], msgspec.json.encode(page))

    async def _metrics(self, client: AsgiClient) -> None:
        headers: HeaderList = [(b"content-type", METRICS_CONTENT_TYPE.encode())]
        await client.reply(200, headers, await self._serving.exposition())
