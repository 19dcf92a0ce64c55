"""The answer to a request with one prompt: the replica's own bytes."""

from __future__ import annotations

from preble.gateway.http.client import Client
from preble.gateway.requests.attempt import Attempt
from preble.gateway.requests.relay import Relay
from preble.gateway.requests.replies import answer_headers, reply_refusal


async def answer_one_prompt(client: Client, relay: Relay) -> None:
    """Answer with the replica's whole answer, or with its events as they come. Raises: PrebleError."""
    async with relay as attempt:
        if attempt.is_stream:
            attempt.placed.first_token()
            await client.stream(attempt.status, answer_headers(attempt))
            await _pass_through(client, attempt)
    if attempt.is_stream:
        await client.end()
    elif attempt.status >= 400:
        await reply_refusal(client, attempt)
    else:
        await client.reply(attempt.status, answer_headers(attempt), attempt.body)


async def _pass_through(client: Client, attempt: Attempt) -> None:
    meter = attempt.meter
    try:
        await client.write(attempt.first)
        async for chunk in attempt.rest():
            meter.feed(chunk)
            await client.write(chunk)
        if (flaw := meter.flaw()) is not None:
            # The client has got all of it as it is; it only counts as the replica's failure.
            attempt.placed.usage(*meter.tokens())
            attempt.placed.failed(flaw)
    finally:
        attempt.placed.usage(*meter.tokens())
