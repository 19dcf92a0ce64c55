"""A Ray Serve application of emulated replicas: the least that a model's replica and its ingress have to do."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from ray import serve
from ray.serve.config import RequestRouterConfig

from preble import background
from preble.core.costs.model import CostModel
from preble.core.types import pack_tokens
from preble.emulator.answers.placeholders import EmulatedMedia
from preble.emulator.answers.tokenizer import load_tokenizer
from preble.emulator.app import EmulatorApp
from preble.emulator.config import EmulatorConfig
from preble.emulator.engine import EmulatedEngine
from preble.emulator.generation import Prompt
from preble.emulator.kv.events import KvEventPublisher
from preble.emulator.web import EmulatorRequest
from preble.integrations.ray.direct import Asgi, reported
from preble.integrations.ray.placing import PlacerState, placer_states
from preble.integrations.ray.replica import STATS_KEY
from preble.integrations.ray.reports import Reporter
from preble.integrations.ray.settings import request_router_config
from preble.profiles import load_profile
from preble.web.messages import HeaderList
from preble.web.server.answering import RequestHead
from preble.web.server.awaited import ClientGone
from preble.web.server.connection import ClientConnection

PROFILE = "a100-mistral-7b"


class _Emulated:
    """Emulates one engine in the replica's own process."""

    async def __init__(self, kv_tokens: int, speed: float) -> None:  # type: ignore[misc]  # Ray awaits it
        self._config = EmulatorConfig(profile=PROFILE, kv_tokens=kv_tokens, speed=speed, events_port=0)
        self._publisher = KvEventPublisher(self._config)
        self._tokenizer = load_tokenizer(None)
        cost_model = CostModel(load_profile(PROFILE))
        self._engine = EmulatedEngine(self._config, cost_model, self._tokenizer, self._publisher)
        self._reporter = Reporter()
        self._tasks = [
            background.keep(self._engine.run, "emulated engine"),
            background.keep(self._publisher.serve_replay, "replay of KV events"),
        ]

    def record_routing_stats(self) -> dict[str, Any]:
        """Return where the KV events are: Ray passes it on to every router."""
        publisher = self._publisher
        return {
            STATS_KEY: {
                "endpoint": publisher.endpoint,
                "replay_endpoint": publisher.replay_endpoint,
                "kv_tokens": self._config.kv_tokens,
            }
        }

    async def pid(self) -> int:
        """Return the process that serves, for whoever wants to kill it."""
        return os.getpid()

    async def counts(self) -> tuple[int, int, int]:
        """Return the prompt tokens so far, those of them that were cached, and the requests that run."""
        scheduler = self._engine.scheduler
        stats = scheduler.stats
        return stats.prefix_queries, stats.prefix_hits, scheduler.num_running + scheduler.num_waiting


class EmulatedReplica(_Emulated):
    """One that is called through Ray."""

    async def generate(self, body: dict[str, Any]) -> float:
        """Generate `max_tokens` for the token ids in `prompt`. Return when the first came, by the machine's clock."""
        first_at, cached, count = 0.0, 0, 0
        prompt = Prompt(pack_tokens(body["prompt"]), body["max_tokens"])
        with self._engine.generate([prompt]) as generation:
            async for pieces in generation.pieces():
                if not first_at:
                    first_at = time.monotonic()
                    self._reporter.first_token()
                count += len(pieces)
                if (finished := pieces[-1].finished) is not None:
                    cached = finished.num_cached_tokens
        self._reporter.usage(count, cached)
        return first_at


@serve.ingress()
class EmulatedServer(_Emulated):
    """One that HAProxy sends requests to, by OpenAI's API."""

    async def __serve_build_asgi_app__(self) -> Asgi:
        app = EmulatorApp(
            self._config,
            PROFILE,
            [self._engine],
            self._tokenizer,
            EmulatedMedia(self._config.image_tokens),
            [self._publisher],
        )

        async def without_lifespan(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                await AsgiRequest(scope, receive, send, app).answered()

        return reported(without_lifespan, self._reporter)


class AsgiRequest(EmulatorRequest):
    """A request to an emulated replica that Ray's ingress brings over ASGI."""

    def __init__(self, scope: Any, receive: Any, send: Any, app: EmulatorApp) -> None:
        head = RequestHead(scope["method"], scope["path"], dict(scope["headers"]), scope["query_string"])
        super().__init__(cast(ClientConnection, None), head, app.answer, PROFILE)
        self._receive, self._send = receive, send
        self._unsent_messages: list[dict[str, Any]] = []

    async def answered(self) -> None:
        """Answer, unless the client goes."""
        with suppress(ClientGone):
            await self._handle(self)
            await self.drained()

    async def piece(self) -> bytes:
        while self.more_body:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            self.more_body = message.get("more_body", False)
            if message.get("body"):
                return bytes(message["body"])
        return b""

    @contextmanager
    def unless_gone(self) -> Iterator[None]:
        watch = asyncio.ensure_future(self._watch())
        try:
            with super().unless_gone():
                yield
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.lost()

    def reply(self, status: int, headers: HeaderList, body: bytes) -> None:
        self.begin(status, [*headers, (b"content-length", b"%d" % len(body))])
        self.write(body)
        self.end()

    def begin(self, status: int, headers: HeaderList) -> None:
        self._unsent_messages.append({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, data: bytes) -> None:
        self._unsent_messages.append({"type": "http.response.body", "body": data, "more_body": True})

    def end(self) -> None:
        self._unsent_messages.append({"type": "http.response.body", "body": b"", "more_body": False})

    async def drained(self) -> None:
        while self._unsent_messages:
            await self._send(self._unsent_messages.pop(0))


class Ingress:
    """What clients call. Each of its replicas has a router of its own."""

    def __init__(self, replicas: Any) -> None:
        replicas._init()  # makes its router now, not with the first call
        self._replicas = replicas

    async def ask(self, body: dict[str, Any]) -> float:
        """Return the request's time to first token, in seconds."""
        asked_at = time.monotonic()
        first_at: float = await self._replicas.generate.remote(body)
        return first_at - asked_at

    async def pid(self) -> int:
        """As the replica's."""
        return os.getpid()

    async def router_state(self) -> PlacerState:
        """Return what the router of this process knows."""
        return next(iter(placer_states().values()), PlacerState())


def application(*, preble: bool, replicas: int, ingresses: int, kv_tokens: int, speed: float) -> Any:
    """Return the application. `preble`: whether it has Preble's router, not Ray's power of two choices."""
    small = {"num_cpus": 0}
    engines = serve.deployment(
        EmulatedReplica,
        num_replicas=replicas,
        max_ongoing_requests=200,
        ray_actor_options=small,
        request_router_config=request_router_config(profile=PROFILE) if preble else RequestRouterConfig(),
        health_check_period_s=2,
    ).bind(kv_tokens, speed)
    front = serve.deployment(Ingress, num_replicas=ingresses, max_ongoing_requests=1000, ray_actor_options=small)
    return front.bind(engines)
