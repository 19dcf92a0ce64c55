"""What a body says of the work that its request is part of: its session, and whether it may wait."""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw, Struct

from preble.prompts.endpoints.checked import CheckedFields

SESSION_NAME = re.compile(rb"[\x21-\x7e]{1,256}")
"""What can be in a header, and is short."""


FLEX = "flex"
"""OpenAI's service tier of work that may take its time."""


class SessionFields(CheckedFields, kw_only=True):
    """The fields of vLLM and OpenAI that name a session, in the order in which they count, and those of urgency.

    `nvext`: Dynamo's, with the hints of agents.
    """

    session_id: Raw = Raw(b"")
    conversation: Raw = Raw(b"")
    prompt_cache_key: Raw = Raw(b"")
    service_tier: str | None = None
    nvext: Raw = Raw(b"")


class _AgentHints(Struct):
    priority: float | None = None


class _DynamoExtension(Struct):
    agent_hints: _AgentHints | None = None


class _OpenAIConversation(Struct):
    id: str


_EXTENSION = msgspec.json.Decoder(_DynamoExtension | None)
_NAMED = msgspec.json.Decoder(str | _OpenAIConversation | None)


def session_in(fields: SessionFields) -> str | None:
    """Return the name of the session; None where there is none that can be in a header."""
    for raw in (fields.session_id, fields.conversation, fields.prompt_cache_key):
        if memoryview(raw).nbytes and (name := _name(raw)) is not None:
            return name
    return None


def tier_in(fields: SessionFields) -> str | None:
    """Return the service tier that the body names: `flex` where it names none and its agent hints that others go first,
    by a priority below 0. Others of its hints change nothing here: a request can make way, and cannot get ahead.
    """
    if fields.service_tier is not None or not memoryview(fields.nvext).nbytes:
        return fields.service_tier
    try:
        given = _EXTENSION.decode(fields.nvext)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None  # it is advice, and the engine knows no such field
    hints = None if given is None else given.agent_hints
    return FLEX if hints is not None and (hints.priority or 0) < 0 else None


def _name(raw: Raw) -> str | None:
    try:
        given = _NAMED.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None  # the engine says what is wrong with it
    name = given.id if isinstance(given, _OpenAIConversation) else given or ""
    return name if SESSION_NAME.fullmatch(name.encode(errors="replace")) else None
