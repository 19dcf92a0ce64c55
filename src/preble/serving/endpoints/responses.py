"""OpenAI's `/v1/responses`: bodies as the chats that engines make of them, answers, and events.

The translation is vLLM's, and lenient: the replica judges the body, not the gateway. What an earlier response said only
its replica knows; so a request that continues one goes there.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw, Struct

from preble.errors import RequestError
from preble.serving.endpoints.answers import PromptTokensDetails, Usage, decoded_answer
from preble.serving.endpoints.bodies import Fields, PromptLimits, Reserved, decoded, positive, refuse_reserved
from preble.serving.endpoints.events import EventForm, usage_object

Item = dict[str, Any]


class _Reasoning(Struct):
    effort: str | None = None


class ResponsesBody(Reserved, kw_only=True):
    """The fields read from a body for `/v1/responses`."""

    input: str | list[Any] = ""
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    reasoning: _Reasoning | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    cache_salt: str | None = None
    service_tier: str | None = None
    mm_processor_kwargs: Raw = Raw(b"null")
    media_io_kwargs: Raw = Raw(b"null")
    chat_template_kwargs: Raw = Raw(b"null")


_BODY = msgspec.json.Decoder(ResponsesBody)


def read_response(body: bytes, limits: PromptLimits) -> Fields:
    """Read a body for `/v1/responses`. Raises: RequestError."""
    given: ResponsesBody = decoded(_BODY, body)
    refuse_reserved(given)
    if not given.input and given.previous_response_id is None:
        raise RequestError("`input` is missing; give a text or a list of items", param="input")
    return Fields(
        model=given.model or None,
        stream=bool(given.stream),
        chat=msgspec.json.encode(_chat(given)),
        is_translated=True,
        continues=given.previous_response_id,
        max_output_tokens=positive(given.max_output_tokens),
        cache_salt=given.cache_salt,
        service_tier=given.service_tier,
    )


def _chat(given: ResponsesBody) -> Item:
    messages: list[Item] = [{"role": "system", "content": given.instructions}] if given.instructions else []
    items = [item for item in given.input if isinstance(item, dict)] if isinstance(given.input, list) else []
    if isinstance(given.input, str):
        messages.append({"role": "user", "content": given.input})
    for item in items:
        _add(item, messages)
    continues = _is_unfinished(items[-1]) if items else False
    chat: Item = {
        "model": given.model,
        "messages": messages,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "chat_template_kwargs": given.chat_template_kwargs,
        "mm_processor_kwargs": given.mm_processor_kwargs,
        "media_io_kwargs": given.media_io_kwargs,
    }
    tools = [tool for tool in given.tools or () if isinstance(tool, dict) and tool.get("type") == "function"]
    if tools:
        chat["tools"] = [_tool(tool) for tool in tools]
    if given.reasoning is not None and given.reasoning.effort is not None:
        chat["reasoning_effort"] = given.reasoning.effort
    return chat


def _is_unfinished(item: Item) -> bool:
    """Whether the answer goes on with this item, instead of following it."""
    return item.get("type", "message") in ("message", "reasoning") and item.get("status") in (
        "in_progress",
        "incomplete",
    )


def _tool(tool: Item) -> Item:
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _add(item: Item, messages: list[Item]) -> None:
    """Add an item of the input as a message, or to the assistant's message before it."""
    before = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    match item.get("type", "message"):
        case "function_call" | "custom_tool_call":
            _add_call(_call(item), before, messages)
        case "function_call_output" | "custom_tool_call_output":
            messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
        case "reasoning":
            _add_field("reasoning", _reasoning(item), before, messages)
        case _ if item.get("role") == "assistant" and (text := _first_text(item.get("content"))) is not None:
            _add_field("content", text, before, messages)
        case _ if isinstance(item.get("role"), str):
            messages.append(item)


def _add_field(name: str, value: str, before: Item | None, messages: list[Item]) -> None:
    if before is not None and before.get(name) is None:
        before[name] = value
    else:
        messages.append({"role": "assistant", name: value})


def _add_call(call: Item, before: Item | None, messages: list[Item]) -> None:
    if before is not None:
        before.setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _call(item: Item) -> Item:
    arguments = item.get("arguments")
    if item.get("type") == "custom_tool_call":
        arguments = msgspec.json.encode({"input": item.get("input") or ""}).decode()
    name = "__".join(part for part in (item.get("namespace"), item.get("name")) if isinstance(part, str))
    return {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}, "type": "function"}


def _reasoning(item: Item) -> str:
    parts = item.get("content") or item.get("summary")
    return _first_text(parts) or ""


def _first_text(content: Any) -> str | None:
    if isinstance(content, list):
        content = content[0].get("text") if content and isinstance(content[0], dict) else None
    return content if isinstance(content, str) else None


# answers


class _Details(Struct):
    cached_tokens: int | None = None


class ResponseUsage(Struct):
    """The usage of a response."""

    output_tokens: int | None = None
    input_tokens: int = 0
    input_tokens_details: _Details | None = None

    def usage(self) -> Usage:
        """Return it in the form of completions."""
        cached = self.input_tokens_details.cached_tokens if self.input_tokens_details else None
        details = PromptTokensDetails(cached) if cached is not None else None
        return Usage(self.input_tokens, self.output_tokens, self.input_tokens + (self.output_tokens or 0), details)


class _Response(Struct):
    output: Raw
    usage: ResponseUsage | None = None


_RESPONSE = msgspec.json.Decoder(_Response)


def usage_of_response(body: bytes) -> Usage | None:
    """Raises: EngineProtocolError: the replica's answer is no response."""
    usage: ResponseUsage | None = decoded_answer(_RESPONSE, body, "a response").usage
    return usage.usage() if usage is not None else None


def _usage_in_events(tail: bytes) -> Usage | None:
    usage = usage_object(tail, ResponseUsage)
    return usage.usage() if usage is not None else None


_BEFORE = rb"(?:created|queued|in_progress)"
RESPONSE_EVENTS = EventForm(
    error=re.compile(rb"event: ?(?:error|response\.failed)\r?\n"),
    end=re.compile(rb"event: ?response\.(?:completed|incomplete)\r?\n"),
    end_name="response.completed",
    usage=_usage_in_events,
    begin=re.compile(rb"event:(?! ?response\." + _BEFORE + rb"\r?\n)[^\r\n]+\n"),
    tail=4,
    ends_long=True,
)
