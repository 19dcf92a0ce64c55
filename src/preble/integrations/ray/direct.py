"""Direct streaming: Serve's HAProxy asks this deployment for each request's replica, and sends the bytes there itself.

```
engines = serve.deployment(Engine, request_router_config=request_router_config()).bind()
serve.run(direct_application(engines))
```

Answers never pass through Python on their way back, so nobody but the replica sees them: it reports first token and end
(`reported`). What nobody reports on ends with its lease.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from preble.core.types.life import FIRST_TOKEN, Alive, Progress
from preble.errors import ConfigError
from preble.integrations.ray.placing import RESERVATION, PlacerState, placer_states, sent_to
from preble.integrations.ray.reports import Reporter
from preble.prompts.endpoints import ENDPOINTS, Endpoint
from preble.serving import ended

_MUST_BE_SET = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY")
_RENEW_S = 60.0
_MAX_WHOLE_BYTES = 64 << 20
"""We keep a whole answer to read its usage. We keep nothing of a larger one, so its tokens are not counted."""
Message = MutableMapping[str, Any]
Asgi = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


@serve.ingress()
class DirectScheduler:
    """Answers HAProxy's question where a request goes. One replica is one scheduler; several tell each other."""

    def __init__(self, engines: Any) -> None:
        engines._init(_run_router_in_separate_loop=False)
        self._engines = engines

    async def __serve_build_asgi_app__(self) -> Asgi:
        async def app(scope: Message, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                is_asked = (scope["method"], scope["path"]) == ("POST", "/internal/route")
                answer = await self._route(Request(scope, receive)) if is_asked else Response(status_code=404)
                await answer(scope, receive, send)

        return app

    async def _route(self, request: Request) -> Response:
        """Return the replica for the request in the body. 503: there is none."""
        request_id = request.headers.get("x-request-id", "")
        try:
            body = json.loads(await request.body())
        except (ValueError, RecursionError):  # empty, cut off, or no JSON: some replica gets it, and says what is wrong
            body = {}
        arguments = {RESERVATION: request_id} if request_id else {}
        try:
            async with self._engines.choose_replica(body, _reserve=False, **arguments) as selection:
                replica = selection._replica
                sent_to(request_id, replica.replica_id.unique_id)
                host, port = replica.backend_http_endpoint
                return JSONResponse({"host": host, "port": port, "replica_id": replica.replica_id.to_full_id_str()})
        except (RayServeException, RuntimeError, TypeError, ValueError) as error:
            return JSONResponse({"detail": str(error)}, 503)

    async def router_state(self) -> PlacerState:
        """Return what this scheduler knows."""
        return next(iter(placer_states().values()), PlacerState())


def direct_application(engines: Any, *, num_schedulers: int = 1) -> Any:
    """Return the application of bound engines and their scheduler, for `serve.run`.

    Raises: ConfigError: Ray is not set up for it.
    """
    if missing := [name for name in _MUST_BE_SET if os.environ.get(name) != "1"]:
        raise ConfigError(f"direct streaming needs {missing[0]}=1 in the environment of Ray and of this process")
    options = {"num_replicas": num_schedulers, "max_ongoing_requests": 1000, "ray_actor_options": {"num_cpus": 0}}
    return engines._with_ingress_request_router(serve.deployment(DirectScheduler, **options).bind(engines))


def reported(app: Asgi, reporter: Reporter) -> Asgi:
    """Return the engine's ASGI application, which also reports each request's first token, usage and end."""

    async def reporting(scope: Message, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        endpoint = ENDPOINTS.get(scope.get("path", ""))
        request_id = dict(scope.get("headers", ())).get(b"x-request-id", b"").decode("latin-1")
        if endpoint is None or not request_id:
            await app(scope, receive, send)
            return
        answer = _Answer(endpoint, request_id, reporter)

        async def telling(message: Message) -> None:
            answer.note(message)
            await send(message)

        try:
            await app(scope, receive, telling)
        except Exception:
            answer.failed()
            raise
        finally:
            answer.ended()

    return reporting


class _Answer:
    """One answer on its way out."""

    def __init__(self, endpoint: Endpoint, request_id: str, reporter: Reporter) -> None:
        self._endpoint = endpoint
        self._meter = endpoint.meter()
        self._request_id = request_id
        self._reporter = reporter
        self._is_stream = False
        self._whole: bytearray | None = bytearray()
        """The answer, if it is no stream; None: it is larger than what is kept."""
        self._has_begun = False
        self._status = 499
        """As of clients that have gone, until the answer begins."""
        self._renewing = asyncio.create_task(self._renew())

    def note(self, message: Message) -> None:
        """The application sends this."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._is_stream = b"event-stream" in dict(message.get("headers", ())).get(b"content-type", b"")
        elif message["type"] == "http.response.body" and (body := message.get("body", b"")):
            if not self._is_stream:
                self._keep(body)
                return
            self._meter.feed(body)
            if self._meter.has_begun and not self._has_begun:
                self._has_begun = True
                self._reporter.report(self._request_id, FIRST_TOKEN)

    def _keep(self, body: bytes) -> None:
        if self._whole is not None and len(self._whole) + len(body) > _MAX_WHOLE_BYTES:
            self._whole = None
        elif self._whole is not None:
            self._whole += body

    def failed(self) -> None:
        """The application has raised an error."""
        self._status = 500

    async def _renew(self) -> None:
        while True:
            self._reporter.report(self._request_id, Alive())
            await asyncio.sleep(_RENEW_S)

    def ended(self) -> None:
        """The application is done, or its client has gone."""
        self._renewing.cancel()
        tokens = Progress(*self._tokens())
        end = msgspec.structs.replace(ended(status=self._status), **msgspec.structs.asdict(tokens))
        self._reporter.report(self._request_id, end)

    def _tokens(self) -> tuple[int, int | None]:
        if self._is_stream:
            return self._meter.tokens()
        try:
            usage = self._endpoint.usage(bytes(self._whole)) if self._whole and self._status < 400 else None
        except Exception:  # noqa: BLE001 (whatever the engine answered is its client's business)
            usage = None
        return (usage.output_tokens or 0, usage.cached_tokens) if usage is not None else (0, None)
