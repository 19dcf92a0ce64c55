"""What a body says of the session that its request belongs to."""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw, Struct

from preble.prompts.endpoints.checked import CheckedFields

SESSION_NAME = re.compile(rb"[\x21-\x7e]{1,256}")
"""What can be in a header, and is short."""


class SessionFields(CheckedFields, kw_only=True):
    """The fields of vLLM and OpenAI that name a session, in the order in which they count."""

    session_id: Raw = Raw(b"")
    conversation: Raw = Raw(b"")
    prompt_cache_key: Raw = Raw(b"")


class _OpenAIConversation(Struct):
    id: str


_NAMED = msgspec.json.Decoder(str | _OpenAIConversation | None)


def session_in(fields: SessionFields) -> str | None:
    """Return the name of the session; None where there is none that can be in a header."""
    for raw in (fields.session_id, fields.conversation, fields.prompt_cache_key):
        if memoryview(raw).nbytes and (name := _name(raw)) is not None:
            return name
    return None


def _name(raw: Raw) -> str | None:
    try:
        given = _NAMED.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None  # the engine says what is wrong with it
    name = given.id if isinstance(given, _OpenAIConversation) else given or ""
    return name if SESSION_NAME.fullmatch(name.encode(errors="replace")) else None
