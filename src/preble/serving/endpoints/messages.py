"""Anthropic's `/v1/messages`: bodies as the chats that engines make of them, answers, and events.

vLLM and SGLang turn such a body into a chat for the model's own template. The translation here is vLLM's. It is
lenient: what cannot be translated is left out, since the replica judges the body, not the gateway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw, Struct

from preble.errors import RequestError
from preble.serving.endpoints.answers import PromptTokensDetails, Usage, decoded_answer
from preble.serving.endpoints.bodies import (
    BYTES_PER_TOKEN,
    Fields,
    PromptLimits,
    Reserved,
    decoded,
    positive,
    refuse_reserved,
)
from preble.serving.endpoints.events import EventForm, usage_object

_BILLING = "x-anthropic-billing-header"
"""Claude Code begins a system block with it: a hash of the request, which engines leave out."""

Part = dict[str, Any]


class MessagesBody(Reserved, kw_only=True):
    """The fields read from a body for `/v1/messages` and `/v1/messages/count_tokens`."""

    messages: list[Part]
    model: str | None = None
    system: Any = None
    tools: list[Any] | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    cache_salt: str | None = None
    service_tier: str | None = None
    thinking: Any = None
    output_config: Any = None
    chat_template_kwargs: Raw = Raw(b"null")


_BODY = msgspec.json.Decoder(MessagesBody)


def read_messages(body: bytes, limits: PromptLimits) -> Fields:
    """Read a body for `/v1/messages`. Raises: RequestError."""
    given: MessagesBody = decoded(_BODY, body)
    refuse_reserved(given)
    if not given.model:
        raise RequestError("`model` is missing", param="model")
    return Fields(
        model=given.model,
        stream=bool(given.stream),
        chat=msgspec.json.encode(_chat(given)),
        is_translated=True,
        max_output_tokens=positive(given.max_tokens),
        cache_salt=given.cache_salt,
        service_tier=given.service_tier,
    )


def read_count(body: bytes, limits: PromptLimits) -> Fields:
    """Read a body for `/v1/messages/count_tokens`. Raises: RequestError."""
    given: MessagesBody = decoded(_BODY, body)
    refuse_reserved(given)
    return Fields(model=given.model or None, load_tokens=len(body) // BYTES_PER_TOKEN)


def _chat(given: MessagesBody) -> Part:
    system = _texts_of_system(given.system)
    messages = [{"role": "system", "content": "".join(system)}] if system else []
    for message in given.messages:
        messages += _translated(message)
    chat: Part = {"model": given.model, "messages": messages, "chat_template_kwargs": given.chat_template_kwargs}
    if given.tools is not None:
        chat["tools"] = [_tool(tool) for tool in given.tools if isinstance(tool, dict)]
    if effort := _effort(given):
        chat["reasoning_effort"] = effort
    return chat


def _effort(given: MessagesBody) -> str | None:
    if isinstance(given.thinking, dict) and given.thinking.get("type") == "disabled":
        return "none"
    effort = given.output_config.get("effort") if isinstance(given.output_config, dict) else None
    return effort if isinstance(effort, str) else None


def _texts_of_system(system: Any) -> list[str]:
    """Return the texts of a system prompt or message, without Claude Code's billing header."""
    if isinstance(system, str):
        return [system] if system else []
    texts = [part["text"] for part in _parts(system) if part.get("type") == "text" and _is_text(part.get("text"))]
    return [text for text in texts if text and not text.startswith(_BILLING)]


def _parts(content: Any) -> list[Part]:
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _translated(message: Part) -> Iterator[Part]:
    """Yield the messages of a chat that one of Anthropic's messages becomes: tool results become messages before it."""
    role, content = message.get("role"), message.get("content")
    if role == "system":
        if text := "".join(text for text in _texts_of_system(content) if not text.startswith(_BILLING)):
            yield {"role": "system", "content": text}
        return
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    shown: Part = {"role": role}
    parts: list[Part] = []
    calls: list[Part] = []
    reasoning: list[str] = []
    for part in _parts(content):
        match part.get("type"):
            case "text" if part.get("text"):
                parts.append({"type": "text", "text": part["text"]})
            case "image" if isinstance(part.get("source"), dict):
                parts.append(_image(part["source"]))
            case "thinking" if _is_text(part.get("thinking")):
                reasoning.append(part["thinking"])
            case "tool_use":
                calls.append(_call(part))
            case "tool_result" if role == "user":
                yield from _tool_result(part)
            case "tool_result":
                result = part.get("content") or ""
                parts.append({"type": "text", "text": f"Tool result: {result}"})
    if reasoning:
        shown["reasoning"] = "".join(reasoning)
    if calls:
        shown["tool_calls"] = calls
    if parts:
        shown["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    if role != "user" or "content" in shown:
        yield shown


def _image(source: Part) -> Part:
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _call(part: Part) -> Part:
    arguments = msgspec.json.encode(part.get("input") or {}).decode()
    return {
        "id": part.get("id") or "",
        "type": "function",
        "function": {"name": part.get("name") or "", "arguments": arguments},
    }


def _tool_result(part: Part) -> Iterator[Part]:
    content, call_id = part.get("content"), part.get("tool_use_id") or ""
    inner = _parts(content)
    texts = [item.get("text", "") for item in inner if item.get("type") == "text"]
    text = content if isinstance(content, str) else "\n".join(text for text in texts if _is_text(text))
    yield {"role": "tool", "tool_call_id": call_id, "content": text}
    sources = [item.get("source") for item in inner if item.get("type") == "image"]
    if images := [_image(source) for source in sources if isinstance(source, dict)]:
        yield {"role": "user", "content": images}
    names = [item.get("tool_name") or item.get("name") for item in inner if item.get("type") == "tool_reference"]
    if references := [{"type": "tool_reference", "name": name} for name in names if name]:
        yield {"role": "tool", "tool_call_id": call_id, "content": references}


def _tool(tool: Part) -> Part:
    schema = tool.get("input_schema")
    parameters = {**schema, **({} if "type" in schema else {"type": "object"})} if isinstance(schema, dict) else {}
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}
    function |= {key: tool[key] for key in ("strict", "defer_loading") if tool.get(key) is not None}
    return {"type": "function", "function": function}


# answers


class MessageUsage(Struct):
    """Anthropic's usage: `input_tokens` are those that were not cached."""

    output_tokens: int | None = None
    input_tokens: int = 0
    cache_read_input_tokens: int | None = None

    def usage(self) -> Usage:
        """Return it in the form of completions."""
        cached = self.cache_read_input_tokens
        details = PromptTokensDetails(cached) if cached is not None else None
        prompt_tokens = self.input_tokens + (cached or 0)
        return Usage(prompt_tokens, self.output_tokens, prompt_tokens + (self.output_tokens or 0), details)


class _Message(Struct):
    content: Raw
    usage: MessageUsage | None = None


class _Count(Struct):
    input_tokens: int


_MESSAGE, _COUNT = msgspec.json.Decoder(_Message), msgspec.json.Decoder(_Count)


def usage_of_message(body: bytes) -> Usage | None:
    """Raises: EngineProtocolError: the replica's answer is no message."""
    usage: MessageUsage | None = decoded_answer(_MESSAGE, body, "a message").usage
    return usage.usage() if usage is not None else None


def usage_of_count(body: bytes) -> Usage | None:
    """A count of tokens generates none. Raises: EngineProtocolError: the replica's answer is no count."""
    decoded_answer(_COUNT, body, "a count of tokens")
    return None


def _usage_in_events(tail: bytes) -> Usage | None:
    usage = usage_object(tail, MessageUsage)
    return usage.usage() if usage is not None else None


MESSAGE_EVENTS = EventForm(
    error=re.compile(rb'event: ?error\r?\n|data: ?\{"type": ?"error"'),
    end=re.compile(rb"event: ?message_stop\r?\n"),
    end_name="message_stop",
    usage=_usage_in_events,
    begin=re.compile(rb"event: ?(?:content_block_|message_delta|message_stop|error)"),
    tail=4,
)
"""vLLM sends `message_start` with the first token, SGLang may send it at once."""
