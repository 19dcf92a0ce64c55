"""The application of a front-end process: it answers placed requests, and has the scheduler process answer the rest."""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec

from preble.config import GatewayConfig
from preble.gateway.app import READY, App
from preble.gateway.http.asgi_client import AsgiClient, Message
from preble.gateway.pages.live import UI, UI_EVENTS, UI_PICTURE
from preble.serving import JSON_TYPE, Answer, Ask, FrontEnd, HeaderList, SchedulerAway, Serving, endpoint_of

_LARGEST_BYTES = 64 * 1024
"""The longest body of a request that is passed on: no page takes more."""
_OWN = frozenset({"/health", "/healthz", "/livez", "/ping", "/version", UI, UI_EVENTS})
_NOT_PASSED_BACK = frozenset({b"content-length", b"connection"})


class FrontApp(App):
    """Answers every request of a front-end process. `share`: how many such processes share the memory for bodies."""

    def __init__(self, config: GatewayConfig, front_end: FrontEnd, share: int) -> None:
        self._front_end = front_end
        self.num_processes = share
        # Only pages use what `Serving` adds to `Intake`, and those are passed on.
        super().__init__(config, cast(Serving, front_end))

    async def _route(self, method: str, path: str, client: AsgiClient) -> None:
        if path in _OWN or endpoint_of(path) is not None:
            await super()._route(method, path, client)
        elif await self._is_let_in(path, client):
            try:
                await self._pass_on(method, path, client)
            except SchedulerAway:
                if path not in READY:
                    raise
                await self._ready_alone(client)

    async def _pass_on(self, method: str, path: str, client: AsgiClient) -> None:
        """Raises: SchedulerAway."""
        with self.bodies.share() as share:
            body = await client.read_body(_LARGEST_BYTES, self._body_s, share) if method == "POST" else b""
            answer = await self._front_end.page(method, path, client.query, client.headers.items(), body)
        await client.reply(answer.status, list(answer.headers), answer.body)

    async def _take_picture(self, client: AsgiClient) -> bytes:
        """Raises: SchedulerAway: or it refuses this client."""
        answer = await self._front_end.page("GET", UI_PICTURE, b"", client.headers.items(), b"")
        if answer.status != 200:
            raise SchedulerAway(f"the scheduler process answers {UI_PICTURE} with status {answer.status}")
        return answer.body

    async def _ready_alone(self, client: AsgiClient) -> None:
        """Answer whether this process is ready while the scheduler process is away: it then places by load."""
        count = len(self._front_end.replicas)
        status = "draining" if self.is_draining else "ready" if count else "no replica is up"
        page = {"status": status, "replicas": count, "scheduler": "away"}
        await client.reply(200 if status == "ready" else 503, [JSON_TYPE], msgspec.json.encode(page))

    def count(self, path: str, status: int | None) -> None:
        """Count a request, unless the scheduler process answers it and so counts it."""
        if path in _OWN or endpoint_of(path) is not None or not self._front_end.is_led:
            super().count(path, status)


async def answer_passed_on(app: App, ask: Ask) -> Answer:
    """Return the application's answer to an HTTP request that another process has passed on."""
    scope = {"method": ask.method, "path": ask.path, "query_string": ask.query, "headers": ask.headers}
    passed_on = _PassedOn(ask.body)
    await app(scope, passed_on.receive, passed_on.send)
    headers = [header for header in passed_on.headers if header[0] not in _NOT_PASSED_BACK]
    return Answer(ask.number, passed_on.status, headers, bytes(passed_on.answer))


class _PassedOn:
    """One request as the application sees it. Its client never goes before it has the answer."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 500
        self.headers: HeaderList = []
        self.answer = bytearray()

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is None:
            await asyncio.get_running_loop().create_future()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message["headers"]
        else:
            self.answer += message["body"]
