"""The answer to a request with one prompt: the replica's own bytes."""

from __future__ import annotations

from preble.gateway.requests.attempt import Attempt, Sink
from preble.gateway.requests.placed_client import PlacedClient
from preble.gateway.requests.relay import Relay
from preble.gateway.requests.replies import answer_headers, reply_refusal


async def answer_one_prompt(client: PlacedClient, relay: Relay, *, stream: bool) -> None:
    """Answer with the replica's whole answer, or with its events as they come. Raises: PrebleError."""

    def begin(attempt: Attempt) -> None:
        client.begin(attempt.status, answer_headers(attempt))
        client.pause_if_full()  # of answers before this one, which it has not read

    attempt = await relay.carry(Sink(begin, client.write) if stream else None)
    if attempt.is_stream:
        client.end()
    elif attempt.status >= 300:
        reply_refusal(client, attempt)
    else:
        client.reply(attempt.status, answer_headers(attempt), attempt.body)
