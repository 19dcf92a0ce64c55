"""A completion with a list of prompts: each is placed on its own, and their answers are merged into one.

Some prompts are at work at once, so that other requests get their turn. The body for each is made when it is sent, and
room for the bodies at work is taken from the memory budget before the first is made.

Choice `j` of prompt `i` has index `i * n + j`, as in an engine that gets the whole list. If one prompt fails, the
request fails and the other prompts are aborted.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import msgspec
from msgspec import Raw

from preble.core.types import TOKEN_BYTES, unpack_tokens
from preble.errors import EngineProtocolError, EngineRefused
from preble.gateway.http.events import DONE, EVENT_STREAM, EventSplitter, event
from preble.gateway.http.headers import placement_headers
from preble.gateway.requests.attempt import Attempt, Sink
from preble.gateway.requests.relay import Relay
from preble.gateway.requests.replies import reply_refusal
from preble.prompts.endpoints import JSON_TYPE, MOST_TOKENS, Prompt, Usage
from preble.prompts.endpoints.answers import decoded_answer
from preble.prompts.endpoints.bodies import FIELDS, WHOLE, decoded
from preble.serving import ParsedRequest

if TYPE_CHECKING:
    from preble.gateway.requests.json_requests import JsonRequest

Relays = Callable[[int, bytes], Awaitable[Relay]]
"""Makes the relay of prompt `index`, given the body for its replica."""


class _Refused(Exception):
    """A replica answered one prompt with an error status, and with it the whole request."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt.status)
        self.attempt = attempt


class _Prompts:
    """The prompts of one request, `at_once` of them at work."""

    def __init__(self, parsed: ParsedRequest, relays: Relays, at_once: int) -> None:
        self._prompts = parsed.fields.prompts
        self._relays = relays
        self._turns = asyncio.Semaphore(at_once)
        self._fields: dict[str, Raw] = decoded(FIELDS, parsed.body)
        self.num_choices = parsed.fields.num_choices
        """Of each prompt."""
        shared = sum(len(name) + len(value) for name, value in self._fields.items() if name != "prompt")
        longest = max(_encoded_size(prompt) for prompt in parsed.fields.prompts)
        self.num_bytes = min(at_once, len(parsed.fields.prompts)) * (shared + longest)
        """The most that the bodies at work take together."""

    async def carry(self, index: int, sink: Sink | None) -> Attempt:
        """Wait for the prompt's turn, then carry it. Raises: PrebleError. _Refused: a replica refused it."""
        async with self._turns:
            attempt = await _carried(await self._relays(index, self._body(index)), sink)
            if attempt.status >= 300:
                raise _Refused(attempt)
            return attempt

    def _body(self, index: int) -> bytes:
        """Return the client's own body with that prompt alone."""
        prompt = self._prompts[index]
        sent = prompt if isinstance(prompt, (str, Raw)) else list(unpack_tokens(prompt))
        return msgspec.json.encode(self._fields | {"prompt": sent})


async def _carried(relay: Relay, sink: Sink | None) -> Attempt:
    """Return the attempt that got an answer, once the answer is complete. Raises: PrebleError."""
    waiting = _Waiting()
    try:
        await relay.begin(waiting, sink)
        return await waiting.attempt
    except BaseException:
        relay.abort()
        raise


@final
class _Waiting:
    """Waits for what becomes of a relay. Nobody may wait any more: another prompt has failed in the same turn of the
    event loop."""

    def __init__(self) -> None:
        self.attempt: asyncio.Future[Attempt] = asyncio.get_running_loop().create_future()

    def carried(self, attempt: Attempt) -> None:
        if not self.attempt.done():
            self.attempt.set_result(attempt)

    def not_carried(self, error: BaseException) -> None:
        if not self.attempt.done():
            self.attempt.set_exception(error)


def _encoded_size(prompt: Prompt) -> int:
    """Return at least the bytes of a prompt in JSON: six for a letter, eleven for a token id."""
    if isinstance(prompt, Raw):
        return memoryview(prompt).nbytes
    return 6 * len(prompt) if isinstance(prompt, str) else 11 * len(prompt) // TOKEN_BYTES


async def answer_prompt_list(client: JsonRequest, parsed: ParsedRequest, relays: Relays, *, at_once: int) -> None:
    """Answer a completion that has several prompts, `at_once` of them at work. Raises: PrebleError."""
    prompts = _Prompts(parsed, relays, at_once)
    client.memory.grow(prompts.num_bytes)
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
        reply_refusal(client, first.attempt)
    finally:
        client.memory.shrink(prompts.num_bytes)


# whole answers


async def _answer_whole(client: JsonRequest, parsed: ParsedRequest, prompts: _Prompts) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(prompts.carry(i, None)) for i in range(parsed.num_prompts)]
    attempts = [task.result() for task in tasks]
    merged = _merged([attempt.body for attempt in attempts], prompts.num_choices)
    placements = placement_headers([attempt.placed.placement for attempt in attempts])
    client.reply(200, [JSON_TYPE, *placements], merged)


def _merged(answers: list[bytes], n: int) -> bytes:
    """Return one answer with all choices in order and the sum of the usages. Raises: EngineProtocolError."""
    wholes = [decoded_answer(WHOLE, answer, "a completion") for answer in answers]
    total = _Total()
    choices = []
    for i, answer in enumerate(wholes):
        choices += _reindexed(answer, i * n)
        total.add(answer.get("usage"))
    merged = {**wholes[0], "choices": choices}
    if usage := total.usage():
        merged["usage"] = usage
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
    """The sum of several usages: of each count that a replica reports, whatever its name. `details`: of its parts, such
    as those of a prompt that were cached.
    """

    counts: Counter[str] = field(default_factory=Counter)
    details: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, fields: Any) -> None:
        """Add one decoded usage, or None. Raises: EngineProtocolError."""
        if fields is None:
            return
        try:
            msgspec.convert(fields, Usage)
        except msgspec.ValidationError as error:
            raise EngineProtocolError(f"the replica's answer has an unreadable usage: {error}") from error
        self.counts.update(_counts_in(fields))
        for name, parts in fields.items():
            if isinstance(parts, dict) and (counts := _counts_in(parts)):
                self.details[name].update(counts)

    def usage(self) -> dict[str, Any]:
        """Return the sum in OpenAI's form, empty where no replica reported any. What none reported is left out."""
        return {**self.counts, **self.details}


def _counts_in(fields: dict[str, Any]) -> dict[str, int]:
    return {name: count for name, count in fields.items() if type(count) is int and 0 <= count <= MOST_TOKENS}


# streamed answers


async def _answer_stream(client: JsonRequest, parsed: ParsedRequest, prompts: _Prompts) -> None:
    merged = _MergedStream(client, f"cmpl-{parsed.request_id}")
    async with asyncio.TaskGroup() as group:
        for i in range(parsed.num_prompts):
            group.create_task(_carry_stream(prompts, i, merged))
    merged.end()


async def _carry_stream(prompts: _Prompts, index: int, merged: _MergedStream) -> None:
    """Pass one prompt's stream on. Raises: PrebleError, _Refused."""
    attempt = await prompts.carry(index, _Part(merged, index * prompts.num_choices))
    if attempt.flaw is not None:
        raise attempt.flaw


@final
class _Part:
    """The stream of one prompt within the merged one. `offset`: of its choices."""

    def __init__(self, merged: _MergedStream, offset: int) -> None:
        self._merged = merged
        self._offset = offset
        self._splitter = EventSplitter()

    def begin_stream(self, attempt: Attempt) -> None:
        """The first event of any prompt begins the answer."""

    def write(self, data: bytes) -> None:
        for one in self._splitter.feed(data):
            if one != b"[DONE]":
                self._merged.write(_reindexed_event(one, self._offset))


def _reindexed_event(data: bytes, offset: int) -> dict[str, Any]:
    whole = decoded_answer(WHOLE, data, "a stream of a completion")
    return {**whole, "choices": _reindexed(whole, offset)}


class _MergedStream:
    """The events of all prompts as one stream, with the sum of the usages once at its end."""

    def __init__(self, client: JsonRequest, stream_id: str) -> None:
        self._client = client
        self._id = stream_id
        self._total = _Total()
        self._last: dict[str, Any] = {}

    def write(self, decoded: dict[str, Any]) -> None:
        """Take one decoded event. Raises: EngineProtocolError."""
        if self._client.status is None:
            self._client.begin(200, [(b"content-type", EVENT_STREAM)])
        elif not self._client.is_streaming:
            return  # the client has gone, and the prompts' tasks do not know it yet
        self._last = decoded = {**decoded, "id": self._id}
        if decoded["choices"]:
            self._client.write(event(msgspec.json.encode(decoded)))
            self._client.pause_if_full()
        else:
            self._total.add(decoded.get("usage"))

    def end(self) -> None:
        """Every prompt's stream has ended. Raises: EngineProtocolError: none had an event."""
        if self._client.status is None:
            raise EngineProtocolError("the replicas' streams have no events")
        if usage := self._total.usage():
            self._client.write(event(msgspec.json.encode({**self._last, "choices": [], "usage": usage})))
        self._client.write(DONE)
        self._client.end()
