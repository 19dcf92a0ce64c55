"""Pages for the clients of front-end processes, which pass such requests on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from preble.gateway.http.asgi_client import Message, Receive, Send
from preble.prompts.endpoints import HeaderList
from preble.serving import PageAnswer, PageRequest

_NOT_PASSED_BACK = frozenset({b"content-length", b"connection"})


async def answer_passed_on(
    app: Callable[[Mapping[str, Any], Receive, Send], Awaitable[None]], request: PageRequest
) -> PageAnswer:
    """Return the application's answer to an HTTP request that another process has passed on."""
    scope = {"method": request.method, "path": request.path, "query_string": request.query, "headers": request.headers}
    passed_on = _PassedOn(request.body)
    await app(scope, passed_on.receive, passed_on.send)
    headers = [header for header in passed_on.headers if header[0] not in _NOT_PASSED_BACK]
    return PageAnswer(request.number, passed_on.status, headers, bytes(passed_on.answer))


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
