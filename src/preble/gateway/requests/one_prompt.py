"""The answer to a request with one prompt: the replica's own bytes."""

from __future__ import annotations

from preble.errors import EngineProtocolError
from preble.gateway.http.client import EVENT_STREAM, JSON_TYPE, Client, HeaderList
from preble.gateway.requests.intake import Intake, ParsedRequest
from preble.gateway.requests.relay import Relay, ResponseHead
from preble.serving.api import ErrorForm, decode_answer, is_json_object
from preble.serving.dispatcher import Attempt
from preble.serving.sse import StreamMeter, looks_like_events

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
"""Headers of one connection only, and those that are ours: a replica may be such a gateway itself."""
_OF_THE_BODY = (b"content-type", b"content-encoding")


async def answer_one_prompt(intake: Intake, client: Client, parsed: ParsedRequest) -> None:
    """Answer a request that has one prompt. Raises: PrebleError."""
    relay = await intake.relay(parsed)
    if parsed.fields.stream:
        await _stream(client, relay)
        return
    async with relay as head:
        body = await read_answer(relay, head)
    if head.status >= 400:
        await reply_refusal(client, head, relay.placed, body)
    else:
        await client.reply(head.status, answer_headers(head, relay.placed), body)


async def _stream(client: Client, relay: Relay) -> None:
    async with relay as head:
        if head.status >= 400:
            refusal = await relay.read_all(head)
        else:
            refusal = None
            check_event_stream(head)
            relay.first_token()
            await client.stream(head.status, answer_headers(head, relay.placed))
            await _pass_through(client, relay, head)
    if refusal is None:
        await client.end()
    else:
        await reply_refusal(client, head, relay.placed, refusal)


async def _pass_through(client: Client, relay: Relay, head: ResponseHead) -> None:
    meter = StreamMeter()
    try:
        meter.feed(head.first)
        await client.write(head.first)
        async for chunk in relay.rest():
            meter.feed(chunk)
            await client.write(chunk)
    finally:
        note_usage(relay, meter)


def note_usage(relay: Relay, meter: StreamMeter) -> None:
    """Note in the relay what a stream generated, as far as it came."""
    usage = meter.usage()
    relay.output_tokens = meter.output_tokens()
    relay.cached_tokens = usage.cached_tokens if usage else None


async def read_answer(relay: Relay, head: ResponseHead) -> bytes:
    """The whole body of an answer that is not streamed, its usage noted in the relay.

    Raises: EngineError, among them EngineProtocolError: it is no completion.
    """
    body = await relay.read_all(head)
    if head.status < 300:
        usage = decode_answer(body).usage
        if usage is not None:
            relay.output_tokens = usage.output_tokens or 0
            relay.cached_tokens = usage.cached_tokens
    return body


async def reply_refusal(client: Client, head: ResponseHead, call: Attempt | None, body: bytes) -> None:
    """Answer with a replica's error: as it is where it is JSON, else, as from a proxy on the way, in OpenAI's form."""
    headers = answer_headers(head, call)
    if not is_json_object(body):
        headers = [JSON_TYPE, *(header for header in headers if header[0] not in _OF_THE_BODY)]
        text = f"the replica answered with status {head.status} and no error that can be passed on"
        body = ErrorForm(head.status, "engine_error", "engine_error", text).body()
    await client.reply(head.status, headers, body)


def check_event_stream(head: ResponseHead) -> None:
    """Raises: EngineProtocolError: the answer is not a stream of events."""
    content_type = head.headers.get("content-type", "")
    if not head.first:
        raise EngineProtocolError("the replica's answer is empty")
    if not content_type.startswith(EVENT_STREAM.decode()) or not looks_like_events(head.first):
        raise EngineProtocolError(
            f"the replica's answer is not an event stream but {content_type[:100] or 'unnamed'!r}"
        )


def answer_headers(head: ResponseHead, call: Attempt | None) -> HeaderList:
    """The replica's headers that are for the client, and ours."""
    # Encoded as the HTTP client decoded them, so that the bytes stay the same, whatever they are.
    headers = [
        (name.lower().encode(), value.encode("utf-8", "surrogateescape"))
        for name, value in head.headers.items()
        if name.lower() not in _NOT_PASSED_BACK
    ]
    if call is not None:
        placement = call.placement
        headers += [
            (b"x-preble-replica", placement.replica_id.encode()),
            (b"x-preble-reason", placement.reason.encode()),
            (b"x-preble-matched-tokens", b"%d" % placement.matched_tokens),
        ]
    return headers
