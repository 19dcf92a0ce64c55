"""The ASGI application: routes, API keys, and every failure turned into an answer in OpenAI's form."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from preble.config import GatewayConfig
from preble.errors import PrebleError
from preble.gateway.http.body_budget import BodyMemoryBudget
from preble.gateway.http.client import JSON_TYPE, Client, ClientGone, HeaderList, Receive, Send, error_headers
from preble.gateway.http.debug import DEBUG, PARITY, DebugPages
from preble.gateway.requests.inference import Inference
from preble.serving.api import CHAT, COMPLETIONS, ErrorForm, error_form
from preble.serving.dispatcher import Dispatcher
from preble.serving.parity.watch import ParityWatch
from preble.serving.telemetry.metrics import METRICS_CONTENT_TYPE, Telemetry

Handler = Callable[[Client], Awaitable[None]]

_WITH_KEY = ("/v1/", DEBUG)
"""What needs an API key where there are any."""
_GONE = 499
"""The status under which clients that went away are counted; nobody gets to see it."""
_BODIES_HELD = 64
"""Bodies of the largest size for which there is room at once."""
_UNAUTHORIZED = ErrorForm(
    401, "authentication_error", "invalid_api_key", "give a valid API key, as `Authorization: Bearer KEY`"
)
_STOPPING = ErrorForm(503, "service_unavailable", "shutting_down", "the gateway is shutting down", retry_after_s=1.0)


class App:
    """What the gateway answers. One instance serves all connections of one event loop."""

    def __init__(
        self,
        config: GatewayConfig,
        dispatcher: Dispatcher,
        inference: Inference,
        telemetry: Telemetry,
        parity: ParityWatch,
    ) -> None:
        self._limits = config.limits
        self._body_s = config.timeouts.body_s
        self._room = BodyMemoryBudget(
            _BODIES_HELD * config.limits.max_body_bytes, retry_after_s=config.limits.retry_after_s
        )
        telemetry.body_bytes.set_function(lambda: self._room.held)
        self._keys = [key.encode() for key in config.auth.api_keys]
        self._dispatcher = dispatcher
        self._inference = inference
        self._telemetry = telemetry
        self._debug = DebugPages(dispatcher, parity)
        self._started_at = int(time.time())
        self._gets: Mapping[str, Handler] = {
            "/v1/models": self._models,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
        }

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        client = Client(scope["headers"], receive, send, query=scope["query_string"])
        path: str = scope["path"]
        # A second cancellation, at the server's very end, meets a client that does not even read why.
        with contextlib.suppress(asyncio.CancelledError):
            await self._answer(scope["method"], path, client)
        self._telemetry.responses.labels(self._counted_as(path), str(client.status)).inc()

    async def _answer(self, method: str, path: str, client: Client) -> None:
        """Whatever goes wrong becomes an answer here."""
        try:
            await self._route(method, path, client)
        except ClientGone:
            client.status = _GONE
        except PrebleError as error:
            await self._fail(client, error_form(error), error)
        except asyncio.CancelledError:
            # Only the server cancels this task, when its patience with running requests ends; the task ends here.
            await client.fail(_STOPPING)
        except Exception as error:  # noqa: BLE001 (the task's root: a failure must not reach the client as a traceback)
            await self._fail(client, error_form(PrebleError()), error)

    def _counted_as(self, path: str) -> str:
        """The path in metrics: one of few."""
        if path.startswith(DEBUG):
            return DEBUG
        return path if path in self._gets or path in (COMPLETIONS, CHAT) else "other"

    async def _fail(self, client: Client, form: ErrorForm, error: Exception) -> None:
        if form.status >= 500:
            is_bug = form.code == "internal_error"
            self._telemetry.log.error(
                "request_failed",
                request_id=client.request_id,
                error=str(error),
                code=form.code,
                exc_info=error if is_bug else None,
            )
        await client.fail(form)

    async def _route(self, method: str, path: str, client: Client) -> None:
        if self._keys and path.startswith(_WITH_KEY) and not self._is_authorized(client):
            await client.reply(401, [JSON_TYPE, (b"www-authenticate", b"Bearer")], _UNAUTHORIZED.body())
        elif path in (COMPLETIONS, CHAT):
            if method == "POST":
                with self._room.share() as share:
                    body = await client.read_body(self._limits.max_body_bytes, self._body_s, share)
                    await self._inference.answer(path, client, body)
            else:
                await self._not_allowed(client, method, b"POST")
        elif path == PARITY and method == "POST":
            await self._debug.check_parity(client)
        elif path.startswith(DEBUG) or path in self._gets:
            if method in ("GET", "HEAD"):
                handler = self._gets.get(path)
                await (handler(client) if handler is not None else self._debug.answer(path, client))
            else:
                await self._not_allowed(client, method, b"GET, HEAD, POST" if path == PARITY else b"GET, HEAD")
        else:
            there = ", ".join((COMPLETIONS, CHAT, *self._gets))
            text = f"there is no {method} {path[:200]}; there are {there} and pages below {DEBUG}"
            form = ErrorForm(404, "invalid_request_error", "not_found", text)
            await client.reply(404, error_headers(form), form.body())

    async def _not_allowed(self, client: Client, method: str, allowed: bytes) -> None:
        text = f"{method} is not allowed here; use {allowed.decode()}"
        form = ErrorForm(405, "invalid_request_error", "method_not_allowed", text)
        await client.reply(405, [*error_headers(form), (b"allow", allowed)], form.body())

    def _is_authorized(self, client: Client) -> bool:
        """Compares with every key, in a time that tells nothing of them."""
        scheme, _, given = client.headers.get(b"authorization", b"").partition(b" ")
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)

    async def _models(self, client: Client) -> None:
        """The union of what the live replicas serve."""
        data = [
            {
                "id": name,
                "object": "model",
                "created": self._started_at,
                "owned_by": replica.info.engine,
                "max_model_len": replica.info.max_model_len,
            }
            for name, replica in sorted(self._dispatcher.models().items())
        ]
        await client.reply(200, [JSON_TYPE], msgspec.json.encode({"object": "list", "data": data}))

    async def _health(self, client: Client) -> None:
        await client.reply(200, [JSON_TYPE], b'{"status":"ok"}')

    async def _ready(self, client: Client) -> None:
        live = self._dispatcher.live.values()
        untrusted = sum(not replica.trusted for replica in live)
        status = "ready" if live else "no replica is up"
        body = msgspec.json.encode({"status": status, "replicas": len(live), "untrusted": untrusted})
        await client.reply(200 if live else 503, [JSON_TYPE], body)

    async def _metrics(self, client: Client) -> None:
        headers: HeaderList = [(b"content-type", METRICS_CONTENT_TYPE.encode())]
        await client.reply(200, headers, self._telemetry.exposition())
