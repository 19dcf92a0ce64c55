"""Anthropic's `/v1/messages`: bodies, which engines make chats of, answers, and events."""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw, Struct

from preble.errors import RequestError
from preble.prompts.chats.from_anthropic import chat_of_message
from preble.prompts.endpoints.answers import PromptTokensDetails, Usage, decoded_answer
from preble.prompts.endpoints.bodies import (
    BYTES_PER_TOKEN,
    WHOLE,
    Fields,
    PromptLimits,
    decoded,
    positive,
)
from preble.prompts.endpoints.events import EventForm, usage_objects
from preble.prompts.endpoints.shared_fields import CheckedFields, check_fields


class MessagesBody(CheckedFields, kw_only=True):
    """The fields read from a body for `/v1/messages` and `/v1/messages/count_tokens`."""

    messages: list[Raw]
    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    cache_salt: str | None = None
    service_tier: str | None = None


_BODY = msgspec.json.Decoder(MessagesBody)


def read_messages(body: bytes, limits: PromptLimits) -> Fields:
    """Read a body for `/v1/messages`. Raises: RequestError."""
    given: MessagesBody = decoded(_BODY, body)
    check_fields(given, limits.vocabulary)
    if not given.model:
        raise RequestError("`model` is missing", param="model")
    return Fields(
        model=given.model,
        stream=bool(given.stream),
        chat=msgspec.json.encode(chat_of_message(decoded(WHOLE, body))),
        is_translated=True,
        max_output_tokens=positive(given.max_tokens),
        cache_salt=given.cache_salt,
        service_tier=given.service_tier,
    )


def read_count(body: bytes, limits: PromptLimits) -> Fields:
    """Read a body for `/v1/messages/count_tokens`. Raises: RequestError."""
    given: MessagesBody = decoded(_BODY, body)
    check_fields(given, limits.vocabulary)
    return Fields(model=given.model or None, load_tokens=len(body) // BYTES_PER_TOKEN)


# answers


class MessageUsage(Struct):
    """Anthropic's usage: `input_tokens` are those that were neither cached before nor are now."""

    output_tokens: int | None = None
    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def usage(self) -> Usage:
        """Return it in the form of completions."""
        cached = self.cache_read_input_tokens
        details = PromptTokensDetails(cached) if cached is not None else None
        prompt_tokens = (self.input_tokens or 0) + (cached or 0) + (self.cache_creation_input_tokens or 0)
        return Usage(prompt_tokens, self.output_tokens, prompt_tokens + (self.output_tokens or 0), details)


class _AnthropicMessage(Struct):
    content: Raw
    usage: MessageUsage | None = None


class _Count(Struct):
    input_tokens: int


_MESSAGE, _COUNT = msgspec.json.Decoder(_AnthropicMessage), msgspec.json.Decoder(_Count)


def usage_of_message(body: bytes) -> Usage | None:
    """Raises: EngineProtocolError: the replica's answer is no message."""
    usage: MessageUsage | None = decoded_answer(_MESSAGE, body, "a message").usage
    return usage.usage() if usage is not None else None


def usage_of_count(body: bytes) -> Usage | None:
    """Return None, for a count generates no tokens. Raises: EngineProtocolError: the replica's answer is no count."""
    decoded_answer(_COUNT, body, "a count of tokens")
    return None


_DELTA = b"message_delta"


def _usage_in_events(tail: bytes) -> Usage | None:
    """vLLM reports all counts at the end; SGLang those of the prompt only in `message_start`."""
    usages = usage_objects(tail, MessageUsage)
    if not usages:
        return None
    cached = [one.cache_read_input_tokens for one in usages if one.cache_read_input_tokens is not None]
    output_tokens = usages[-1].output_tokens if _DELTA in tail else None  # `message_start` says 0
    return MessageUsage(
        output_tokens, usages[-1].input_tokens, cached[-1] if cached else None, usages[-1].cache_creation_input_tokens
    ).usage()


MESSAGE_EVENTS = EventForm(
    error=re.compile(rb'event: ?error\r?\n|data: ?\{"type": ?"error"'),
    end=re.compile(rb"event: ?message_stop\r?\n"),
    end_name="message_stop",
    usage=_usage_in_events,
    begin=re.compile(rb"event: ?(?:content_block_|message_delta|message_stop|error)"),
)
"""vLLM sends `message_start` with the first token, SGLang may send it at once."""
