"""The selection service as pages of a running gateway, which checks keys and answers errors."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from preble.errors import RequestError
from preble.gateway.http.page_client import PageClient
from preble.gateway.http.refusals import NO_ADMINS, not_allowed
from preble.gateway.server import Gateway
from preble.selection.openapi import routes_page
from preble.selection.routes import OPENAPI, TABLE, Route, RouteCall, route_path
from preble.selection.service import SelectionService

_DECODED_AT_ONCE_BYTES = 128 * 1024
"""Larger bodies are decoded in another thread: one of this size holds the event loop for about a millisecond."""


class SelectionPages:
    """Answers the routes of the selection service."""

    def __init__(self, gateway: Gateway, service: SelectionService) -> None:
        self._gateway = gateway
        self._service = service

    @property
    def paths(self) -> tuple[str, ...]:
        """The routes' paths, as an answer for an unknown one lists them."""
        return (*TABLE, OPENAPI)

    def name_of(self, path: str) -> str | None:
        """Return the path of a route as metrics name it. None for another path."""
        name, _ = route_path(path)
        return name if name in TABLE or name == OPENAPI else None

    async def answer(self, method: str, client: PageClient) -> None:
        """Answer a path that has a name. Raises: PrebleError, ClientGone."""
        path, name = route_path(client.path)
        if path == OPENAPI:
            await client.reply_json(200, routes_page())
            return
        route = TABLE[path].get("GET" if method == "HEAD" else method)
        if route is None:
            await not_allowed(client, method, TABLE[path])
        elif route.changes_workers and not self._gateway.keys.has_keys:
            await client.fail(NO_ADMINS)
        else:
            await self._answer(route, name, client)

    async def _answer(self, route: Route, name: str, client: PageClient) -> None:
        with self._gateway.bodies.share() as share:
            body = None
            if route.takes is not None:
                body = await _decoded(await self._gateway.read_body(client, share), route.takes)
            answer = route.answer(RouteCall(self._service, client.caller, name, client.head.query, body))
            if inspect.isawaitable(answer):
                with client.unless_gone():
                    answer = await answer
            await client.reply_json(route.status, answer)


async def _decoded(body: bytes, kind: type) -> Any:
    """Raises: RequestError: the body is not of this kind."""

    def decode() -> Any:
        return msgspec.json.decode(body or b"{}", type=kind)

    try:
        return decode() if len(body) <= _DECODED_AT_ONCE_BYTES else await asyncio.to_thread(decode)
    except msgspec.ValidationError as error:
        raise RequestError(f"the body is not as {OPENAPI} says: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error


@asynccontextmanager
async def selecting(gateway: Gateway) -> AsyncIterator[SelectionService]:
    """Serve a gateway that also answers the selection service's routes. Leaving the context ends pending selections."""
    service = SelectionService(gateway)
    gateway.pages.added = SelectionPages(gateway, service)
    held = service.reservations
    gateway.serving.telemetry.numbers.read(
        lambda: [
            ("preble_reservations", (), [float(len(held))]),
            ("preble_reservations_expired_total", (), [float(held.num_expired)]),
        ]
    )
    try:
        yield service
    finally:
        gateway.pages.added = None
        await held.close()
