"""A completion with a list of prompts: each is placed on its own, and their answers are merged into one.

Choice `j` of prompt `i` has index `i * n + j`, as in an engine that gets the whole list. If one prompt fails, the
request fails and the other prompts are aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

from preble.core.types import unpack_tokens
from preble.errors import EngineProtocolError, EngineRefused, RequestError
from preble.gateway.http.client import Client
from preble.gateway.http.errors import JSON_TYPE, HeaderList
from preble.gateway.http.events import DONE, EVENT_STREAM, EventSplitter, event
from preble.gateway.requests.attempt import Attempt
from preble.gateway.requests.relay import Relay
from preble.gateway.requests.replies import reply_refusal
from preble.serving import ParsedRequest, Prompt, PromptTokensDetails, StreamMeter, Usage

Relays = Callable[[int, bytes], Awaitable[Relay]]
"""Makes the relay of prompt `index`, given the body for its replica."""
_MAX_COPIED_BYTES = 128 * 1024 * 1024
"""The most that the fields beside the prompts may take in all the bodies made from one: they are copied into each."""
_WAITING_EVENTS = 64
"""The most events that wait for a slow client; then the replicas are read no further."""


class _Refused(Exception):
    """A replica answered one prompt with an error status, and with it the whole request."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt.status)
        self.attempt = attempt


async def answer_prompt_list(client: Client, parsed: ParsedRequest, relays: Relays) -> None:
    """Answer a completion that has several prompts. Raises: PrebleError."""
    answer = _answer_stream if parsed.fields.stream else _answer_whole
    try:
        await answer(client, parsed, relays)
    except ExceptionGroup as group:
        # The first failure cancelled the others; failures at the same moment add nothing.
        first = group.exceptions[0]
        if not isinstance(first, _Refused):
            raise first from None
        if client.status is not None:
            raise EngineRefused(f"a replica answered one of the prompts with status {first.attempt.status}") from None
        await reply_refusal(client, first.attempt)


def _bodies(parsed: ParsedRequest) -> list[bytes]:
    """Return the body for each prompt: the client's own with that prompt alone.

    Raises: RequestError: the copies of the other fields would take too much memory.
    """
    fields = msgspec.json.decode(parsed.body, type=dict[str, Raw])
    shared = sum(len(name) + len(value) for name, value in fields.items() if name != "prompt")
    if shared * len(parsed.prompts) > _MAX_COPIED_BYTES:
        raise RequestError(
            f"`prompt` has {len(parsed.prompts)} prompts, and {shared} bytes of other fields go with each; send fewer"
            " prompts at once",
            param="prompt",
        )
    return [msgspec.json.encode(fields | {"prompt": Raw(_encoded(prompt))}) for prompt in parsed.prompts]


def _encoded(prompt: Prompt) -> bytes:
    return msgspec.json.encode(prompt if isinstance(prompt, str) else list(unpack_tokens(prompt)))


# whole answers


async def _answer_whole(client: Client, parsed: ParsedRequest, relays: Relays) -> None:
    async with asyncio.TaskGroup() as group:
        bodies = _bodies(parsed)
        tasks = [group.create_task(_whole(relays, i, body)) for i, body in enumerate(bodies)]
    attempts = [task.result() for task in tasks]
    merged = _merged([attempt.body for attempt in attempts], parsed.fields.n or 1)
    await client.reply(200, _merged_headers(attempts), merged)


async def _whole(relays: Relays, index: int, body: bytes) -> Attempt:
    """Return the attempt with one prompt's answer. Raises: PrebleError, _Refused."""
    async with await relays(index, body) as attempt:
        pass
    if attempt.status >= 400:
        raise _Refused(attempt)
    return attempt


def _merged(answers: list[bytes], n: int) -> bytes:
    """Return one answer with all choices in order and the sum of the usages."""
    decoded = [msgspec.json.decode(answer) for answer in answers]
    total = _Total()
    choices = []
    for i, answer in enumerate(decoded):
        choices += _reindexed(answer, i * n)
        total.add(answer.get("usage"))
    merged = {**decoded[0], "choices": choices}
    if total.seen:
        merged["usage"] = total.usage()
    return msgspec.json.encode(merged)


def _reindexed(answer: dict[str, Any], offset: int) -> list[dict[str, Any]]:
    """Return the choices of one prompt's answer, their indices raised by `offset`. Raises: EngineProtocolError."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not all(
        isinstance(c, dict) and isinstance(c.get("index"), int) for c in choices
    ):
        raise EngineProtocolError("the replica's answer has no list of choices with an index")
    return [{**choice, "index": choice["index"] + offset} for choice in choices]


@dataclass(slots=True)
class _Total:
    """The sum of several usages."""

    seen: bool = False
    sum: Usage = field(default_factory=Usage)

    def add(self, fields: Any) -> None:
        """Add one decoded usage, or None. Raises: EngineProtocolError."""
        if fields is None:
            return
        try:
            usage = msgspec.convert(fields, Usage)
        except msgspec.ValidationError as error:
            raise EngineProtocolError(f"the replica's answer has an unreadable usage: {error}") from error
        total = self.sum
        cached = (total.cached_tokens, usage.cached_tokens)
        self.sum = Usage(
            prompt_tokens=total.prompt_tokens + usage.prompt_tokens,
            completion_tokens=(total.completion_tokens or 0) + (usage.completion_tokens or 0),
            total_tokens=total.total_tokens + usage.total_tokens,
            prompt_tokens_details=None if cached == (None, None) else PromptTokensDetails(sum(c or 0 for c in cached)),
        )
        self.seen = True

    def usage(self) -> dict[str, Any]:
        """Return the sum in OpenAI's form. Cached tokens are left out where no replica reported any."""
        fields: dict[str, Any] = {
            "prompt_tokens": self.sum.prompt_tokens,
            "completion_tokens": self.sum.completion_tokens,
            "total_tokens": self.sum.total_tokens,
        }
        if self.sum.cached_tokens is not None:
            fields["prompt_tokens_details"] = {"cached_tokens": self.sum.cached_tokens}
        return fields


def _merged_headers(attempts: list[Attempt]) -> HeaderList:
    placements = [attempt.placed.placement for attempt in attempts]
    replicas = ",".join(sorted({placement.replica_id for placement in placements}))
    reasons = ",".join(sorted({placement.reason for placement in placements}))
    matched = sum(placement.matched_tokens for placement in placements)
    return [
        JSON_TYPE,
        (b"x-preble-replica", replicas.encode()),
        (b"x-preble-reason", reasons.encode()),
        (b"x-preble-matched-tokens", b"%d" % matched),
    ]


# streamed answers

_Events = asyncio.Queue[dict[str, Any] | None]
"""Decoded events of all prompts, with a None at the end of each prompt's stream."""


async def _answer_stream(client: Client, parsed: ParsedRequest, relays: Relays) -> None:
    events: _Events = asyncio.Queue(_WAITING_EVENTS)
    async with asyncio.TaskGroup() as group:
        for i, body in enumerate(_bodies(parsed)):
            group.create_task(_produce(relays, i, body, i * (parsed.fields.n or 1), events))
        await _consume(client, parsed, events)


async def _produce(relays: Relays, index: int, body: bytes, offset: int, events: _Events) -> None:
    """Read one prompt's stream into the queue. Raises: PrebleError, _Refused."""
    async with await relays(index, body) as attempt:
        if attempt.status >= 400:
            raise _Refused(attempt)
        attempt.placed.first_token()
        await _read_events(attempt, offset, events)
    await events.put(None)


async def _read_events(attempt: Attempt, offset: int, events: _Events) -> None:
    meter, splitter = StreamMeter(), EventSplitter()
    try:
        chunk = attempt.first
        while chunk:
            meter.feed(chunk)
            for data in splitter.feed(chunk):
                if data != b"[DONE]":
                    await events.put(_reindexed_event(data, offset))
            chunk = await anext(attempt.rest(), b"")
        if (flaw := meter.flaw()) is not None:
            raise flaw
    finally:
        attempt.placed.usage(*meter.tokens())


def _reindexed_event(data: bytes, offset: int) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise EngineProtocolError(f"the replica streamed something that is not a completion: {error}") from error
    return {**decoded, "choices": _reindexed(decoded, offset)}


async def _consume(client: Client, parsed: ParsedRequest, events: _Events) -> None:
    """Write the events of all prompts as one stream, with the sum of the usages once at its end."""
    total = _Total()
    running = len(parsed.prompts)
    last: dict[str, Any] = {}
    while running:
        decoded = await events.get()
        if decoded is None:
            running -= 1
            continue
        if client.status is None:
            await client.stream(200, [(b"content-type", EVENT_STREAM)])
        last = decoded = {**decoded, "id": f"cmpl-{parsed.request_id}"}
        if decoded["choices"]:
            await client.write(event(msgspec.json.encode(decoded)))
        else:
            total.add(decoded.get("usage"))
    if client.status is None:
        raise EngineProtocolError("the replicas' streams have no events")
    if total.seen:
        await client.write(event(msgspec.json.encode({**last, "choices": [], "usage": total.usage()})))
    await client.write(DONE)
    await client.end()
