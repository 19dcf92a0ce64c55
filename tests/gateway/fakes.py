"""A replica under a test's control: a real HTTP server whose behaviour for each request is scripted."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web

from preble.engines.starting.ports import free_ports

Behaviour = Callable[["FakeReplica", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class FakeReplica:
    """One OpenAI-compatible replica. `script`: behaviours of the next requests; afterwards it answers normally.

    `paths`: that it serves too.
    """

    def __init__(
        self,
        models: list[dict[str, Any]] | None = None,
        max_model_len: int = 8192,
        address: str = "127.0.0.1",
        paths: tuple[str, ...] = (),
    ) -> None:
        self._address = address
        self._paths = paths
        self.models = models or [{"id": "tiny", "max_model_len": max_model_len}]
        self.script: deque[Behaviour] = deque()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.running = 0
        self.aborts = 0
        self.questions = 0
        """How often it was asked for its models."""
        self.healthy = True
        self.silent = False
        """Takes connections, answers no question about itself."""
        self.tokenizes = True
        self.tokenize_gated = False
        self.tokenizing = 0
        self.cached_tokens: int | None = None
        """What it reports of each prompt as cached."""
        self.gate = asyncio.Event()
        """What gated behaviours wait for."""
        self.pages: dict[str, Any] = {}
        """JSON that it answers further GET requests with, by path; to be set before it starts."""
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{self._address}:{self.port}"

    async def start(self) -> None:
        """Listen; after a stop, on the same port again, which no client can have been given meanwhile."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._no_metrics)
        app.router.add_post("/v1/completions", self._serve)
        app.router.add_post("/v1/chat/completions", self._serve)
        for path in self._paths:
            app.router.add_post(path, self._serve)
        app.router.add_post("/tokenize", self._tokenize)
        for path in self.pages:
            app.router.add_get(path, self._page)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        self.port = self.port or free_ports(1)[0]
        await web.TCPSite(self._runner, self._address, self.port, reuse_address=True).start()

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _models(self, request: web.Request) -> web.Response:
        self.questions += 1
        if self.silent:
            await asyncio.Event().wait()
        if not self.healthy:
            return web.json_response({"error": "unwell"}, status=500)
        return web.json_response({"object": "list", "data": self.models})

    async def _page(self, request: web.Request) -> web.Response:
        return web.json_response(self.pages[request.path])

    async def _no_metrics(self, request: web.Request) -> web.Response:
        return web.Response(text="")

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.tokenizes:
            return web.json_response({"error": {"message": "none here"}}, status=404)
        if self.tokenize_gated:
            self.tokenizing += 1
            await self.gate.wait()
        body = await request.json()
        text = body["prompt"] if "prompt" in body else "".join(m["content"] for m in body["messages"])
        return web.json_response({"tokens": [ord(c) for c in text]})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw)
        self.bodies.append(raw)
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        behaviour = self.script.popleft() if self.script else answer
        self.running += 1
        try:
            return await behaviour(self, request, body)
        except asyncio.CancelledError:
            self.aborts += 1
            raise
        finally:
            self.running -= 1


AnyFake = TypeVar("AnyFake", bound=FakeReplica)


@asynccontextmanager
async def replicas(count: int, **options: Any) -> AsyncIterator[list[FakeReplica]]:
    """`count` fake replicas, stopped at the end."""
    async with running([FakeReplica(**options) for _ in range(count)]) as fakes:
        yield fakes


@asynccontextmanager
async def running(fakes: list[AnyFake]) -> AsyncIterator[list[AnyFake]]:
    """Start them; stop them at the end."""
    try:
        for fake in fakes:
            await fake.start()
        yield fakes
    finally:
        for fake in fakes:
            fake.gate.set()
            await fake.stop()


def prompt_of(body: dict[str, Any]) -> str:
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])


def _usage(replica: FakeReplica, body: dict[str, Any]) -> dict[str, Any]:
    tokens = len(prompt_of(body))
    n = body.get("n") or 1
    usage: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": 3 * n, "total_tokens": tokens + 3 * n}
    if replica.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": replica.cached_tokens}
    return usage


def _choice(body: dict[str, Any], index: int, text: str, of_chat: str) -> dict[str, Any]:
    """`of_chat`: what a chat's text stands in, "message" or, of an event, "delta"."""
    said = {of_chat: {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
    return {"index": index, **said}


def _pieces(body: dict[str, Any]) -> list[dict[str, Any]]:
    n = body.get("n") or 1
    return [
        {"id": "engine", "model": "tiny", "choices": [_choice(body, j, f"{prompt_of(body)}:{i}", "delta")]}
        for i in range(3)
        for j in range(n)
    ]


async def answer(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A whole answer, or three events a choice, with usage if it was asked for."""
    if not body.get("stream"):
        choices = [_choice(body, j, f"{prompt_of(body)}:{j}", "message") for j in range(body.get("n") or 1)]
        return web.json_response({"id": "engine", "model": "tiny", "choices": choices, "usage": _usage(replica, body)})
    response = await started_stream(request)
    for piece in _pieces(body):
        await send_event(response, piece)
    if (body.get("stream_options") or {}).get("include_usage"):
        await send_event(response, {"id": "engine", "choices": [], "usage": _usage(replica, body)})
    await response.write(b"data: [DONE]\n\n")
    return response


async def started_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def send_event(response: web.StreamResponse, data: Any) -> None:
    await response.write(b"data: " + json.dumps(data).encode() + b"\n\n")


async def gated(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answers nothing until the gate opens."""
    await replica.gate.wait()
    return await answer(replica, request, body)


async def gated_stream(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """One event, then the rest once the gate opens."""
    response = await started_stream(request)
    first, *rest = _pieces(body)
    await send_event(response, first)
    await replica.gate.wait()
    for piece in rest:
        await send_event(response, piece)
    await response.write(b"data: [DONE]\n\n")
    return response


async def ticking_stream(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """An event every now and then, until the gate opens."""
    response = await started_stream(request)
    while not replica.gate.is_set():
        await send_event(response, _pieces(body)[0])
        await asyncio.sleep(0.01)
    await response.write(b"data: [DONE]\n\n")
    return response


def with_headers(headers: dict[str, str]) -> Behaviour:
    """Answers normally, with these headers."""

    async def behave(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await answer(replica, request, body)
        response.headers.update(headers)
        return response

    return behave


def _break(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


def _close(request: web.Request) -> None:
    """Close the connection once what was written is out."""
    assert request.transport is not None
    request.transport.close()


async def die_before(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The connection breaks before any byte of an answer."""
    _break(request)
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def die_before_body(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The connection breaks after the head of the answer."""
    response = await started_stream(request)
    _break(request)
    return response


async def die_after(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The connection breaks after the first event."""
    response = await started_stream(request)
    await send_event(response, _pieces(body)[0])
    await replica.gate.wait()
    _close(request)
    return response


async def die_midway(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The connection breaks in the middle of a whole answer."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    _close(request)
    return response


def status(code: int, error: Any = "no") -> Behaviour:
    """Answers with an error status."""

    async def behave(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": error}}, status=code, headers={"X-Engine": "fake"})

    return behave


def rubbish(body_sent: bytes, content_type: str, code: int = 200) -> Behaviour:
    """Answers with something else than a completion or an error in OpenAI's form."""

    async def behave(replica: FakeReplica, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=body_sent, headers={"Content-Type": content_type}, status=code)

    return behave
