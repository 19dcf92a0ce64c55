"""OpenAI's `/v1/responses`: bodies, which engines make chats of, answers, and events.

Only the replica of an earlier response knows what it said, so a request that continues it goes there.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw, Struct

from preble.errors import RequestError
from preble.prompts.chats.from_responses import chat_of_response
from preble.prompts.endpoints.answers import PromptTokensDetails, Usage, decoded_answer
from preble.prompts.endpoints.bodies import WHOLE, Fields, PromptLimits, decoded, positive
from preble.prompts.endpoints.events import EventForm, usage_objects
from preble.prompts.endpoints.shared_fields import SessionFields, check_fields, session_in, tier_in


class ResponsesBody(SessionFields, kw_only=True):
    """The fields read from a body for `/v1/responses`."""

    input: str | list[Raw] = ""
    model: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    cache_salt: str | None = None


_BODY = msgspec.json.Decoder(ResponsesBody)


def read_response(body: bytes, limits: PromptLimits) -> Fields:
    """Read a body for `/v1/responses`. Raises: RequestError."""
    given: ResponsesBody = decoded(_BODY, body)
    check_fields(given, limits.vocabulary)
    if not given.input and given.previous_response_id is None:
        raise RequestError("`input` is missing; give a text or a list of items", param="input")
    return Fields(
        model=given.model or None,
        stream=bool(given.stream),
        chat=msgspec.json.encode(chat_of_response(decoded(WHOLE, body))),
        is_translated=True,
        special_tokens_on_vllm=True,
        continues=given.previous_response_id,
        max_output_tokens=positive(given.max_output_tokens),
        cache_salt=given.cache_salt,
        service_tier=tier_in(given),
        session=session_in(given),
    )


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
    usages = usage_objects(tail, ResponseUsage)
    return usages[-1].usage() if usages else None


_ID = re.compile(rb'"id": ?"(resp_[\w.:-]{1,200})"')
_ID_WITHIN_BYTES = 4096


def id_of_response(answer: bytes) -> str | None:
    """Return the id of a response, given the beginning of its answer; None if there is none."""
    found = _ID.search(answer, 0, _ID_WITHIN_BYTES)
    return found[1].decode() if found else None


_BEFORE = rb"(?:created|queued|in_progress)"
RESPONSE_EVENTS = EventForm(
    error=re.compile(rb"event: ?(?:error|response\.failed)\r?\n"),
    end=re.compile(rb"event: ?response\.(?:completed|incomplete)\r?\n"),
    end_name="response.completed",
    usage=_usage_in_events,
    begin=re.compile(rb"event:(?! ?response\." + _BEFORE + rb"\r?\n)[^\r\n]+\n"),
    ends_long=True,
)
