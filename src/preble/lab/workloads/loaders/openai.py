"""OpenAI-style request bodies and logs, one JSON object a line: completions (`prompt`) and chat (`messages`).

The body may be the line itself, or its `body` or `request`, as in the Batch API's input and in most gateways' logs. The
length of the answer is `usage.completion_tokens`, of the line or of its `response`; else what was asked for
(`max_completion_tokens`, `max_tokens`, `output_tokens`); else `LoadOptions.default_output_tokens`. When it arrived is
`timestamp`, `created_at` or `created`. vLLM's custom data set and SGLang's of kind openai are of this format too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from preble.core.types import pack_tokens
from preble.lab.workloads.lines import bad_line, decoded_lines
from preble.lab.workloads.loaders.assemble import assembled, seconds_of, workload_name
from preble.lab.workloads.loaders.chat import ChatMessage, ChatSegments
from preble.lab.workloads.loaders.options import LoadOptions
from preble.lab.workloads.model import Segment, Workload, WorkloadRequest
from preble.lab.workloads.trace import MAX_TOKENS

EXAMPLE = '{"timestamp": 1700000000.5, "body": {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 64}}'

Count = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
NumAnswers = Annotated[int, Meta(ge=1, le=16_384)]
"""As many as vLLM allows."""


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class _ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[Any] | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: Count | None = None


class _Body(msgspec.Struct, frozen=True):
    messages: list[_ChatMessage] | None = None
    tools: list[Any] | None = None
    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    n: NumAnswers | None = None
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    output_tokens: Count | None = None


class _Answer(msgspec.Struct, frozen=True):
    usage: _Usage | None = None
    created: float | str | None = None


class _RecordedResponse(_Answer, frozen=True):
    body: _Answer | None = None


class _RecordedLine(_Body, frozen=True):
    custom_id: str | None = None
    request_id: str | None = None
    id: str | int | None = None
    timestamp: float | str | None = None
    created_at: float | str | None = None
    created: float | str | None = None
    body: _Body | None = None
    request: _Body | None = None
    response: _RecordedResponse | str | None = None
    usage: _Usage | None = None

    @property
    def name(self) -> str | None:
        names = (self.custom_id, self.request_id, self.id)
        return next((str(name) for name in names if name is not None), None)

    @property
    def time(self) -> float | str | None:
        times = (self.timestamp, self.created_at, self.created, *(answer.created for answer in self.answers))
        return next((time for time in times if time is not None), None)

    @property
    def answers(self) -> list[_Answer]:
        """Return the places that describe the answer, the outermost first."""
        if not isinstance(self.response, _RecordedResponse):
            return []
        return [answer for answer in (self.response, self.response.body) if answer is not None]

    @property
    def completion_tokens(self) -> int | None:
        """Return the tokens of all its answers; None if the line does not say."""
        usages = (self.usage, *(answer.usage for answer in self.answers))
        return next(
            (usage.completion_tokens for usage in usages if usage and usage.completion_tokens is not None), None
        )


def read_openai(path: Path, options: LoadOptions) -> Workload:
    """Raises: TraceFormatError."""
    reader = _Reader(path, options.default_output_tokens)
    requests = [
        request for number, line in decoded_lines(path, _RecordedLine, EXAMPLE) for request in reader.take(number, line)
    ]
    workload = assembled(path, requests, "request bodies in OpenAI's form")
    if not reader.num_guessed:
        return workload
    guess = f"{reader.num_guessed} answers of unknown length taken as {options.default_output_tokens} tokens"
    return replace(workload, note=f"{workload.note}; {guess}")


class _Reader:
    """Makes requests of the lines of one file. `num_guessed`: answers of unknown length."""

    def __init__(self, path: Path, default_output_tokens: int) -> None:
        self.num_guessed = 0
        self._path = path
        self._default_output_tokens = default_output_tokens
        self._chat = ChatSegments()
        self._names: set[str] = set()
        self._has_times: bool | None = None

    def take(self, number: int, line: _RecordedLine) -> Iterator[WorkloadRequest]:
        """Yield the requests of a line: one for each answer to each of its prompts. Raises: TraceFormatError."""
        try:
            name = self._name(number, line)
            arrival_s = self._arrival_s(line)
            prompts = self._prompts(_body(line))
            asked = [segments for segments in prompts for _ in range(_body(line).n or 1)]
            output_tokens = self._output_tokens(line, len(asked))
        except ValueError as error:
            raise bad_line(self._path, number, f"{error}; a line looks like {EXAMPLE}") from error
        for i, segments in enumerate(asked):
            request_id = name if len(asked) == 1 else f"{name}.{i}"
            yield WorkloadRequest(request_id, segments, output_tokens, arrival_s=arrival_s)

    def _name(self, number: int, line: _RecordedLine) -> str:
        name = line.name or f"{workload_name(self._path)}-{number}"
        if name in self._names:
            raise ValueError(f"request {name!r} is there twice; give each its own id, or none")
        self._names.add(name)
        return name

    def _arrival_s(self, line: _RecordedLine) -> float | None:
        has_time = line.time is not None
        if self._has_times is None:
            self._has_times = has_time
        if has_time != self._has_times:
            has = (
                "a time stamp although the lines before have none" if has_time else "no time stamp although others have"
            )
            raise ValueError(f"it has {has}; give one to every line, or to none")
        return None if line.time is None else seconds_of(line.time)

    def _prompts(self, body: _Body) -> list[tuple[Segment, ...]]:
        if (body.messages is None) == (body.prompt is None):
            raise ValueError("a request has a prompt or messages, and only one of them")
        if body.messages is not None:
            if not body.messages:
                raise ValueError("messages is empty")
            return [self._chat.prompt([*_tools(body.tools), *map(_message, body.messages)])]
        return [(segment,) for segment in _prompt_segments(body.prompt or [])]

    def _output_tokens(self, line: _RecordedLine, num_answers: int) -> int:
        """Return tokens of each answer; if the line has only their sum, it is divided evenly. Raises: ValueError: too
        many.
        """
        if line.completion_tokens is not None:
            return _bounded(line.completion_tokens // num_answers)
        body = _body(line)
        limits = (body.max_completion_tokens, body.max_tokens, body.output_tokens)
        limit = next((limit for limit in limits if limit is not None), None)
        if limit is None:
            self.num_guessed += num_answers
            return self._default_output_tokens
        return _bounded(limit)


def _bounded(output_tokens: int) -> int:
    if output_tokens > MAX_TOKENS:
        raise ValueError(f"an answer has at most {MAX_TOKENS} tokens, not {output_tokens}")
    return max(1, output_tokens)


def _body(line: _RecordedLine) -> _Body:
    return line.body or line.request or line


def _prompt_segments(prompt: str | Sequence[str | int | list[int]]) -> list[Segment]:
    """Return a segment for each prompt: a text, token ids, or a list of either. Raises: ValueError: it is empty, or
    mixed.
    """
    prompts = [prompt] if isinstance(prompt, str) or any(isinstance(item, int) for item in prompt) else prompt
    if not prompts or not all(prompts):
        raise ValueError("the prompt is empty")
    return [_segment(cast("str | Sequence[int]", one)) for one in prompts]


def _segment(prompt: str | Sequence[int]) -> Segment:
    if isinstance(prompt, str):
        return Segment(text=prompt)
    try:
        return Segment(tokens=pack_tokens(prompt))
    except TypeError as error:
        raise ValueError("a prompt mixes text and token ids") from error


def _tools(tools: Iterable[Any] | None) -> list[ChatMessage]:
    """Return what may be called, which comes first, as in most models' own templates."""
    return [ChatMessage("tools", _json(tools))] if tools else []


def _message(message: _ChatMessage) -> ChatMessage:
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(_part_text(part) for part in content)
    return ChatMessage(message.role, content + (_json(message.tool_calls) if message.tool_calls else ""))


def _part_text(part: _Part) -> str:
    if part.text is None:
        raise ValueError(f"a message has a part of type {part.type!r}; only text can be read, leave such requests out")
    return part.text


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
