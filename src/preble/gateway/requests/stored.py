"""Requests about a response that a replica has stored: passed to that replica, unplaced."""

from __future__ import annotations

from preble.errors import UnknownResponse
from preble.gateway.http.page_client import PageClient
from preble.gateway.requests.replies import pass_on
from preble.prompts.endpoints import ENDPOINTS, Fields
from preble.serving import Intake

STORED = "/v1/responses/"
_ASKED = (("", "GET"), ("", "DELETE"), ("cancel", "POST"))


async def answer_stored(client: PageClient, serving: Intake, method: str, path: str) -> None:
    """Answer a request to `/v1/responses/ID`, or to `cancel` below it. Raises: PrebleError."""
    with serving.ids.taken(client.headers) as request_id:
        parsed = serving.take(ENDPOINTS[STORED[:-1]], client.headers, Fields(), request_id, client.caller)
        async with serving.admitted(parsed):
            with client.unless_gone():
                await _pass_on(client, serving, method, path)


async def _pass_on(client: PageClient, serving: Intake, method: str, path: str) -> None:
    response_id, _, rest = path.removeprefix(STORED).partition("/")
    holder = await serving.stored.holder(response_id, client.caller) if (rest, method) in _ASKED else None
    if holder is None:
        raise UnknownResponse(f"no replica has a response with the id {response_id[:200]!r}")
    target = f"{path}?{client.head.query.decode('latin-1')}" if client.head.query else path
    async with serving.replicas.engine(holder).http.forward(method, target, {}) as response:
        await pass_on(client, response)
