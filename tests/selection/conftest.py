from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.test_tenants import table
from preble.config import AuthConfig
from preble.gateway.server import Gateway
from preble.selection.server import selecting
from preble.selection.service import SelectionService
from support.gateways import idle, quick_gateway
from support.waiting import eventually


class Selecting:
    """A selection service that runs, and a client of it."""

    def __init__(self, gateway: Gateway, service: SelectionService, http: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self.service = service
        self.serving = gateway.serving
        self.url = gateway.url
        self.http = http

    async def ask(self, method: str, path: str, key: str = "", /, **fields: Any) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with self.http.request(method, path, json=fields or None, headers=headers) as answer:
            return answer.status, await answer.json()

    async def post(self, path: str, /, **fields: Any) -> tuple[int, Any]:
        return await self.ask("POST", path, **fields)

    async def idle(self) -> None:
        """Wait until nothing is in flight any more, and have everything check itself."""
        await idle(self.gateway)
        self.service.reservations.check()

    def outcomes(self, request_id: str) -> list[str | None]:
        return [decision.outcome for decision in self.serving.recent.of_request(request_id)]


Select = Callable[..., AbstractAsyncContextManager[Selecting]]


@pytest.fixture
def auth(tmp_path: Path) -> AuthConfig:
    path = tmp_path / "keys.toml"
    path.write_text(table("root", "key-r", admin=True) + table("one", "key-o", share_cache=False))
    return AuthConfig(keys_file=str(path))


@pytest.fixture
def select() -> Select:
    """Start a selection service for replicas and wait until they are live; at its end nothing may be in flight."""

    @asynccontextmanager
    async def start(urls: list[str], *, policy: str = "preble", **changes: Any) -> AsyncIterator[Selecting]:
        async with AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(quick_gateway(urls, policy, **changes))
            service = await stack.enter_async_context(selecting(gateway))
            http = await stack.enter_async_context(aiohttp.ClientSession(gateway.url))
            await eventually(lambda: len(gateway.serving.replicas) == len(urls))
            running = Selecting(gateway, service, http)
            stack.push_async_callback(running.idle)
            stack.push_async_callback(service.reservations.close)
            yield running

    return start
