"""An endpoint: how to read its bodies, its answers and its streams, and which form its errors have."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from preble.prompts.endpoints.answers import Usage
from preble.prompts.endpoints.bodies import Fields, PromptLimits
from preble.prompts.endpoints.by_load import ANY_EVENTS, no_usage, read_by_load
from preble.prompts.endpoints.errors import ErrorStyle
from preble.prompts.endpoints.events import EventForm, StreamMeter

_ID_WITHIN_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint of the engines whose requests are placed.

    `read`: the fields of a body that placing needs; raises RequestError. `usage`: of a whole answer, None if it reports
    none; raises EngineProtocolError if it is no answer of this endpoint. `events`: how it streams. `salt_field`: the
    field of a body that keeps a tenant's KV blocks apart, "" if the endpoint caches none. `by_load`: whether its
    requests are placed by load; its answers may then be of any kind, and streamed or not, whatever the request says.
    `of_tokens`: whether a tokenizer alone can answer. `text_start`: matches the usual beginning of a body, up to the
    inside of the text that is its only prompt; None if there is none. `answer_id`: finds the id of an answer that
    replicas store, None if they store none.
    """

    path: str
    read: Callable[[bytes, PromptLimits], Fields]
    usage: Callable[[bytes], Usage | None]
    events: EventForm
    errors: ErrorStyle = ErrorStyle.OPENAI
    salt_field: str = "cache_salt"
    by_load: bool = False
    of_tokens: bool = False
    text_start: re.Pattern[bytes] | None = None
    label: str = ""
    answer_id: re.Pattern[bytes] | None = None

    @classmethod
    def of_any(
        cls, path: str, errors: ErrorStyle = ErrorStyle.OPENAI, *, label: str = "", of_tokens: bool = False
    ) -> Endpoint:
        """Return an endpoint of which only the model matters: its requests are placed by load."""
        read = (read_by_load, no_usage, ANY_EVENTS)
        return cls(path, *read, errors, salt_field="", by_load=True, of_tokens=of_tokens, label=label)

    @property
    def counted_as(self) -> str:
        """The path's label in metrics: one of few."""
        return self.label or self.path

    def id_of(self, answer: bytes) -> str | None:
        """Return the id of an answer, given its beginning; None if replicas do not store it."""
        found = self.answer_id.search(answer, 0, _ID_WITHIN_BYTES) if self.answer_id is not None else None
        return found[1].decode() if found else None

    def is_unsupported(self, status: int) -> bool:
        """Whether an error says that the engine has no such endpoint, so nothing about the replica's health.

        Of an endpoint that we do not know, no error of the server does: a client may have made it up.
        """
        return self.by_load and (status in (404, 501) or (status >= 500 and bool(self.label)))

    def meter(self) -> StreamMeter:
        """Return the meter of one streamed answer."""
        return StreamMeter(self.events)
