"""The answer to a request with one prompt: the replica's own bytes."""

from __future__ import annotations

from preble.gateway.http.client import Client
from preble.gateway.requests.attempt import Attempt
from preble.gateway.requests.relay import Relay
from preble.gateway.requests.replies import answer_headers, check_event_stream, read_answer, reply_refusal
from preble.serving import StreamMeter


async def answer_whole(client: Client, relay: Relay) -> None:
    """Answer once the replica's answer has been read. Raises: PrebleError."""
    async with relay as attempt:
        body = await read_answer(attempt)
    if attempt.status >= 400:
        await reply_refusal(client, attempt, body)
    else:
        await client.reply(attempt.status, answer_headers(attempt), body)


async def answer_stream(client: Client, relay: Relay) -> None:
    """Answer with the replica's events as they come. Raises: PrebleError."""
    refusal = None
    async with relay as attempt:
        if attempt.status >= 400:
            refusal = await attempt.read_all()
        else:
            check_event_stream(attempt)
            attempt.placed.first_token()
            await client.stream(attempt.status, answer_headers(attempt))
            await _pass_through(client, attempt)
    if refusal is None:
        await client.end()
    else:
        await reply_refusal(client, attempt, refusal)


async def _pass_through(client: Client, attempt: Attempt) -> None:
    meter = StreamMeter()
    try:
        meter.feed(attempt.first)
        await client.write(attempt.first)
        async for chunk in attempt.rest():
            meter.feed(chunk)
            await client.write(chunk)
    finally:
        attempt.placed.usage(*meter.tokens())
