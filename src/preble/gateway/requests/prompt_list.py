"""A completion with a list of prompts: each is placed on its own, and their answers become one.

Choice `j` of prompt `i` has index `i * n + j`, as in an engine that gets the whole list. One prompt that fails fails
the request; the others are aborted.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

from preble.core.types import unpack_tokens
from preble.errors import EngineProtocolError, EngineRefused, RequestError
from preble.gateway.http.client import EVENT_STREAM, JSON_TYPE, Client, HeaderList
from preble.gateway.requests.intake import Intake, ParsedRequest
from preble.gateway.requests.one_prompt import check_event_stream, note_usage, read_answer, reply_refusal
from preble.gateway.requests.relay import Relay, ResponseHead
from preble.serving.api import Prompt, PromptTokensDetails, Usage
from preble.serving.dispatcher import Attempt
from preble.serving.sse import DONE, EventSplitter, StreamMeter, event

_MAX_COPIED_BYTES = 128 * 1024 * 1024
"""What the other fields of a body may take in all the bodies that are made of it: one body of 16 MiB could be
thousands of that size."""
_WAITING_EVENTS = 64
"""Events that wait for a slow client before the replicas are read no further."""


class _Refused(Exception):
    """A replica answered one prompt with an error status; the whole request is answered with it."""

    def __init__(self, head: ResponseHead, body: bytes, call: Attempt | None) -> None:
        super().__init__(head.status)
        self.head = head
        self.body = body
        self.call = call


async def answer_prompt_list(intake: Intake, client: Client, parsed: ParsedRequest) -> None:
    """Answer a completion that has several prompts. Raises: PrebleError."""
    answer = _answer_stream if parsed.fields.stream else _answer_whole
    try:
        await answer(intake, client, parsed)
    except ExceptionGroup as group:
        # The first failure; it has cancelled the others, and those that failed at the same time tell no more.
        first = group.exceptions[0]
        if not isinstance(first, _Refused):
            raise first from None
        if client.status is not None:
            raise EngineRefused(f"a replica answered one of the prompts with status {first.head.status}") from None
        await reply_refusal(client, first.head, first.call, first.body)


def _bodies(parsed: ParsedRequest) -> list[bytes]:
    """The body for each prompt: the client's own, but for the prompt.

    Raises: RequestError: the fields that stand in each of them are too large for so many.
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


async def _answer_whole(intake: Intake, client: Client, parsed: ParsedRequest) -> None:
    async with asyncio.TaskGroup() as group:
        bodies = _bodies(parsed)
        tasks = [group.create_task(_whole(intake, parsed, i, body)) for i, body in enumerate(bodies)]
    parts = [task.result() for task in tasks]
    merged = _merged([part.answer for part in parts], parsed.fields.n or 1)
    await client.reply(200, _merged_headers([part.call for part in parts]), merged)


@dataclass(frozen=True, slots=True)
class _Part:
    answer: bytes
    call: Attempt | None


async def _whole(intake: Intake, parsed: ParsedRequest, index: int, body: bytes) -> _Part:
    relay = await intake.relay(parsed, index, body)
    async with relay as head:
        answer = await read_answer(relay, head)
    if head.status >= 400:
        raise _Refused(head, answer, relay.placed)
    return _Part(answer, relay.placed)


def _merged(answers: list[bytes], n: int) -> bytes:
    """One answer with the choices of all, in order, and the sum of their usage."""
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
    """The choices of one prompt's answer, counted on from `offset`. Raises: EngineProtocolError."""
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
        """Add one usage as decoded, or None. Raises: EngineProtocolError."""
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
        """In OpenAI's form: zeros are shown, what nobody reported is not."""
        fields: dict[str, Any] = {
            "prompt_tokens": self.sum.prompt_tokens,
            "completion_tokens": self.sum.completion_tokens,
            "total_tokens": self.sum.total_tokens,
        }
        if self.sum.cached_tokens is not None:
            fields["prompt_tokens_details"] = {"cached_tokens": self.sum.cached_tokens}
        return fields


def _merged_headers(calls: list[Attempt | None]) -> HeaderList:
    placements = [call.placement for call in calls if call is not None]
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


async def _answer_stream(intake: Intake, client: Client, parsed: ParsedRequest) -> None:
    events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(_WAITING_EVENTS)
    async with asyncio.TaskGroup() as group:
        for i, body in enumerate(_bodies(parsed)):
            group.create_task(_produce(intake, parsed, i, body, events))
        await _consume(client, parsed, events)


async def _produce(
    intake: Intake, parsed: ParsedRequest, index: int, body: bytes, events: asyncio.Queue[dict[str, Any] | None]
) -> None:
    """Read one prompt's stream into the queue, a None at its end. Raises: PrebleError, _Refused."""
    relay = await intake.relay(parsed, index, body)
    async with relay as head:
        if head.status >= 400:
            raise _Refused(head, await relay.read_all(head), relay.placed)
        check_event_stream(head)
        relay.first_token()
        await _read_events(relay, head, index * (parsed.fields.n or 1), events)
    await events.put(None)


async def _read_events(
    relay: Relay, head: ResponseHead, offset: int, events: asyncio.Queue[dict[str, Any] | None]
) -> None:
    meter, splitter = StreamMeter(), EventSplitter()
    try:
        chunk = head.first
        while chunk:
            meter.feed(chunk)
            for data in splitter.feed(chunk):
                if data != b"[DONE]":
                    await events.put(_reindexed_event(data, offset))
            chunk = await anext(relay.rest(), b"")
    finally:
        note_usage(relay, meter)


def _reindexed_event(data: bytes, offset: int) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise EngineProtocolError(f"the replica streamed something that is not a completion: {error}") from error
    return {**decoded, "choices": _reindexed(decoded, offset)}


async def _consume(client: Client, parsed: ParsedRequest, events: asyncio.Queue[dict[str, Any] | None]) -> None:
    """Write the events of all prompts as one stream; usage comes once, at the end, as the sum."""
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
