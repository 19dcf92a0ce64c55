"""From replicas' answers to answers for clients: how an error is passed on, and an answer as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from preble.core.types import Placement
from preble.engines import AwaitedAnswer
from preble.gateway.http.headers import answer_headers
from preble.gateway.http.page_client import PageClient
from preble.gateway.requests.attempt import Attempt
from preble.prompts.endpoints import JSON_TYPE, OTHER, ErrorForm, in_style, nearest_path

if TYPE_CHECKING:
    from preble.gateway.requests.json_requests import JsonRequest

_OF_THE_BODY = (b"content-type", b"content-encoding")
_OBJECT = msgspec.json.Decoder(dict[str, Raw])


def reply_refusal(client: JsonRequest, attempt: Attempt) -> None:
    """Answer with a replica's error: unchanged if it is JSON. Other bodies, as proxies send them, are replaced.

    So are redirects: where they lead is no gateway.
    """
    if attempt.status < 400:
        text = f"the replica redirects this path (status {attempt.status}); the gateway follows no redirects"
        form = ErrorForm(404, "invalid_request_error", "not_found", text)
        client.reply(form.status, [JSON_TYPE], form.body(client.endpoint.errors))
        return
    if attempt.status == 404 and client.endpoint.label == OTHER and (meant := nearest_path(client.endpoint.path[:200])):
        text = f"the replica does not serve {client.endpoint.path[:200]}; did you mean {meant}?"
        form = ErrorForm(404, "invalid_request_error", "not_found", text)
        client.reply(form.status, [JSON_TYPE], form.body(client.endpoint.errors))
        return
    headers, body = answer_headers(attempt.headers, attempt.placed.placement), attempt.body
    if is_json_object(body):
        body = in_style(client.endpoint.errors, attempt.status, body)
    else:
        headers = [JSON_TYPE, *(header for header in headers if header[0] not in _OF_THE_BODY)]
        text = f"the replica answered with status {attempt.status} and no error that can be passed on"
        body = ErrorForm(attempt.status, "engine_error", "engine_error", text).body(client.endpoint.errors)
    client.reply(attempt.status, headers, body)


def is_json_object(body: bytes) -> bool:
    """Return whether this is a JSON object.

    >>> is_json_object(b'{"error": {}}'), is_json_object(b"<html>"), is_json_object(b'"text"')
    (True, False, False)
    """
    try:
        _OBJECT.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True


async def pass_on(client: PageClient, response: AwaitedAnswer, *placements: Placement) -> None:
    """Answer with the replica's answer, as it comes. Raises: EngineGone, EngineTimeout."""
    client.begin(response.status, answer_headers(response.raw_headers, *placements))
    async for chunk in response.chunks():
        await client.write(chunk)
    client.end()
