"""From replicas' answers to answers for clients: what is checked, which headers pass, how an error is passed on."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from preble.errors import EngineProtocolError
from preble.gateway.http.client import Client
from preble.gateway.http.errors import JSON_TYPE, ErrorForm, HeaderList
from preble.gateway.http.events import EVENT_STREAM, looks_like_events
from preble.gateway.requests.attempt import Attempt
from preble.serving import decode_answer

_NOT_PASSED_BACK = frozenset(
    {
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-preble-matched-tokens",
        "x-preble-reason",
        "x-preble-replica",
        "x-request-id",
    }
)
"""Headers of one connection only, and ours: a replica may be such a gateway itself."""
_OF_THE_BODY = (b"content-type", b"content-encoding")
_OBJECT = msgspec.json.Decoder(dict[str, Raw])


async def read_answer(attempt: Attempt) -> bytes:
    """Return the whole body of an answer that is not streamed, and report its usage.

    Raises: EngineError, for example EngineProtocolError: it is no completion.
    """
    body = await attempt.read_all()
    if attempt.status < 300 and (usage := decode_answer(body).usage) is not None:
        attempt.placed.usage(usage.output_tokens or 0, usage.cached_tokens)
    return body


def check_event_stream(attempt: Attempt) -> None:
    """Raises: EngineProtocolError: the answer is not a stream of events."""
    content_type = attempt.headers.get("content-type", "")
    if not attempt.first:
        raise EngineProtocolError("the replica's answer is empty")
    if not content_type.startswith(EVENT_STREAM.decode()) or not looks_like_events(attempt.first):
        raise EngineProtocolError(
            f"the replica's answer is not an event stream but {content_type[:100] or 'unnamed'!r}"
        )


async def reply_refusal(client: Client, attempt: Attempt, body: bytes) -> None:
    """Answer with a replica's error: unchanged if it is JSON. Other bodies, as proxies send them, are replaced."""
    headers = answer_headers(attempt)
    if not is_json_object(body):
        headers = [JSON_TYPE, *(header for header in headers if header[0] not in _OF_THE_BODY)]
        text = f"the replica answered with status {attempt.status} and no error that can be passed on"
        body = ErrorForm(attempt.status, "engine_error", "engine_error", text).body()
    await client.reply(attempt.status, headers, body)


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


def answer_headers(attempt: Attempt) -> HeaderList:
    """Return the replica's headers that are for the client, and those that name the placement."""
    # Encoded as the HTTP client decoded them, so that the bytes stay the same, whatever they are.
    headers = [
        (name.lower().encode(), value.encode("utf-8", "surrogateescape"))
        for name, value in attempt.headers.items()
        if name.lower() not in _NOT_PASSED_BACK
    ]
    placement = attempt.placed.placement
    headers += [
        (b"x-preble-replica", placement.replica_id.encode()),
        (b"x-preble-reason", placement.reason.encode()),
        (b"x-preble-matched-tokens", b"%d" % placement.matched_tokens),
    ]
    return headers
