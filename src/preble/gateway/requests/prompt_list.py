"""A completion with a list of prompts: each is placed on its own, and their answers are merged into one.

Some prompts are at work at once, so that other requests get their turn. The body for each is made when it is sent, and
room for the bodies at work is taken from the memory budget before the first is made.

Choice `j` of prompt `i` has index `i * n + j`, as in an engine that gets the whole list. If one prompt fails, the
request fails and the other prompts are aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

from preble.core.types import TOKEN_BYTES, unpack_tokens
from preble.errors import EngineProtocolError, EngineRefused
from preble.gateway.http.body_memory import BodyReservation
from preble.gateway.http.client import Client
from preble.gateway.http.events import DONE, EVENT_STREAM, EventSplitter, event
from preble.gateway.requests.attempt import Attempt
from preble.gateway.requests.relay import Relay
from preble.gateway.requests.replies import reply_refusal
from preble.serving import JSON_TYPE, HeaderList, ParsedRequest, Prompt, PromptTokensDetails, Usage

Relays = Callable[[int, bytes], Awaitable[Relay]]
"""Makes the relay of prompt `index`, given the body for its replica."""
_WAITING_EVENTS = 64
"""The most events that wait for a slow client; then the replicas are read no further."""


class _Refused(Exception):
    """A replica answered one prompt with an error status, and with it the whole request."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt.status)
        self.attempt = attempt


class _Prompts:
    """The prompts of one request, `at_once` of them at work."""

    def __init__(self, parsed: ParsedRequest, relays: Relays, at_once: int) -> None:
        self._prompts = parsed.prompts
        self._relays = relays
        self._turns = asyncio.Semaphore(at_once)
        self._fields = msgspec.json.decode(parsed.body, type=dict[str, Raw])
        self.num_choices = parsed.fields.num_choices
        """Of each prompt."""
        shared = sum(len(name) + len(value) for name, value in self._fields.items() if name != "prompt")
        longest = max(_encoded_size(prompt) for prompt in parsed.prompts)
        self.num_bytes = min(at_once, len(parsed.prompts)) * (shared + longest)
        """The most that the bodies at work take together."""

    @asynccontextmanager
    async def relayed(self, index: int) -> AsyncIterator[Attempt]:
        """Wait for the prompt's turn, then carry it. Raises: PrebleError. _Refused: a replica refused it."""
        async with self._turns, await self._relays(index, self._body(index)) as attempt:
            if attempt.status >= 400:
                raise _Refused(attempt)
            yield attempt

    def _body(self, index: int) -> bytes:
        """The client's own body with that prompt alone."""
        prompt = self._prompts[index]
        return msgspec.json.encode(
            self._fields | {"prompt": prompt if isinstance(prompt, (str, Raw)) else list(unpack_tokens(prompt))}
        )


def _encoded_size(prompt: Prompt) -> int:
    """At least the bytes of a prompt in JSON: six for a letter, eleven for a token id."""
    if isinstance(prompt, Raw):
        return memoryview(prompt).nbytes
    return 6 * len(prompt) if isinstance(prompt, str) else 11 * len(prompt) // TOKEN_BYTES


async def answer_prompt_list(
    client: Client, parsed: ParsedRequest, relays: Relays, memory: BodyReservation, *, at_once: int
) -> None:
    """Answer a completion that has several prompts, `at_once` of them at work. Raises: PrebleError."""
    prompts = _Prompts(parsed, relays, at_once)
    memory.grow(prompts.num_bytes)
    answer = _answer_stream if parsed.fields.stream else _answer_whole
    try:
        await answer(client, parsed, prompts)
    except ExceptionGroup as group:
        # The first failure cancelled the others; failures at the same moment add nothing.
        first = group.exceptions[0]
        if not isinstance(first, _Refused):
            raise first from None
        if client.status is not None:
            raise EngineRefused(f"a replica answered one of the prompts with status {first.attempt.status}") from None
        await reply_refusal(client, first.attempt)
    finally:
        memory.shrink(prompts.num_bytes)


# whole answers


async def _answer_whole(client: Client, parsed: ParsedRequest, prompts: _Prompts) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_whole(prompts, i)) for i in range(parsed.num_prompts)]
    attempts = [task.result() for task in tasks]
    merged = _merged([attempt.body for attempt in attempts], prompts.num_choices)
    await client.reply(200, _merged_headers(attempts), merged)


async def _whole(prompts: _Prompts, index: int) -> Attempt:
    async with prompts.relayed(index) as attempt:
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


async def _answer_stream(client: Client, parsed: ParsedRequest, prompts: _Prompts) -> None:
    events: _Events = asyncio.Queue(_WAITING_EVENTS)
    async with asyncio.TaskGroup() as group:
        for i in range(parsed.num_prompts):
            group.create_task(_produce(prompts, i, events))
        await _consume(client, parsed, events)


async def _produce(prompts: _Prompts, index: int, events: _Events) -> None:
    """Read one prompt's stream into the queue. Raises: PrebleError, _Refused."""
    async with prompts.relayed(index) as attempt:
        attempt.placed.first_token()
        await _read_events(attempt, index * prompts.num_choices, events)
    await events.put(None)


async def _read_events(attempt: Attempt, offset: int, events: _Events) -> None:
    meter, splitter = attempt.meter, EventSplitter()
    try:
        chunk = attempt.first
        while chunk:
            for data in splitter.feed(chunk):
                if data != b"[DONE]":
                    await events.put(_reindexed_event(data, offset))
            chunk = await anext(attempt.rest(), b"")
            meter.feed(chunk)
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
