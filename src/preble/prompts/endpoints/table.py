"""The table of endpoints: every path whose requests go to replicas, how to read its bodies and its answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from types import MappingProxyType

from preble.prompts.endpoints.answers import Usage, usage_of_completion
from preble.prompts.endpoints.anthropic import (
    MESSAGE_EVENTS,
    read_count,
    read_messages,
    usage_of_count,
    usage_of_message,
)
from preble.prompts.endpoints.bodies import TEXT_OF_COMPLETION, Fields, PromptLimits, read_chat, read_completion
from preble.prompts.endpoints.by_load import ANY_EVENTS, no_usage, read_by_load, read_invocation, usage_of_invocation
from preble.prompts.endpoints.errors import ErrorStyle
from preble.prompts.endpoints.events import OPENAI_EVENTS, EventForm, StreamMeter
from preble.prompts.endpoints.generate import GENERATE_EVENTS, read_generate, read_tokens, usage_of_generated
from preble.prompts.endpoints.responses import RESPONSE_EVENTS, id_of_response, read_response, usage_of_response

_OF_UPLOADS = (b"multipart/", b"audio/", b"image/", b"video/", b"application/octet-stream")


@dataclass(frozen=True)
class Endpoint:
    """One endpoint of the engines whose requests are placed.

    `read`: the fields of a body that placing needs; raises RequestError. `usage`: of a whole answer, None if it reports
    none; raises EngineProtocolError if it is no answer of this endpoint. `events`: how it streams. `salt_field`: the
    field of a body that keeps a tenant's KV blocks apart, "" if the endpoint caches none. `by_load`: whether its
    requests are placed by load; its answers may then be of any kind, and streamed or not, whatever the request says.
    `of_tokens`: whether a tokenizer alone can answer. `text_start`: matches the usual beginning of a body, up to the
    inside of the text that is its only prompt; None if there is none. `answer_id`: finds the id of an answer in its
    beginning; None where replicas store none. `takes_priority`: whether both engines' bodies may have a `priority`.
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
    answer_id: Callable[[bytes], str | None] | None = None
    takes_priority: bool = False

    @classmethod
    def of_any(
        cls, path: str, errors: ErrorStyle = ErrorStyle.OPENAI, *, label: str = "", of_tokens: bool = False
    ) -> Endpoint:
        """Return an endpoint of which only the model matters: its requests are placed by load."""
        read = (read_by_load, no_usage, ANY_EVENTS)
        return cls(path, *read, errors, salt_field="", by_load=True, of_tokens=of_tokens, label=label)

    @cached_property
    def counted_as(self) -> str:
        """The path's label in metrics: one of few."""
        return self.label or self.path

    def is_unsupported(self, status: int) -> bool:
        """Return whether an error says that the engine has no such endpoint, so nothing about the replica's health.

        Of an endpoint that we do not know, no error of the server does: a client may have made it up.
        """
        return self.by_load and (status in (404, 501) or (status >= 500 and bool(self.label)))

    def is_upload(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether the body is not JSON, as its type says, and the endpoint takes such. Many clients mislabel
        JSON.
        """
        return self.by_load and headers.get(b"content-type", b"").lower().startswith(_OF_UPLOADS)

    def meter(self) -> StreamMeter:
        """Return the meter of one streamed answer."""
        return StreamMeter(self.events)


COMPLETIONS = Endpoint(
    "/v1/completions",
    read_completion,
    usage_of_completion,
    OPENAI_EVENTS,
    text_start=TEXT_OF_COMPLETION,
    takes_priority=True,
)
CHAT = Endpoint("/v1/chat/completions", read_chat, usage_of_completion, OPENAI_EVENTS, takes_priority=True)
RESPONSES = Endpoint(
    "/v1/responses",
    read_response,
    usage_of_response,
    RESPONSE_EVENTS,
    ErrorStyle.RESPONSES,
    answer_id=id_of_response,
    takes_priority=True,
)
MESSAGES = Endpoint("/v1/messages", read_messages, usage_of_message, MESSAGE_EVENTS, ErrorStyle.ANTHROPIC)
COUNT_TOKENS = Endpoint(
    "/v1/messages/count_tokens", read_count, usage_of_count, MESSAGE_EVENTS, ErrorStyle.ANTHROPIC, salt_field=""
)
GENERATE = Endpoint(
    "/generate", read_generate, usage_of_generated, GENERATE_EVENTS, salt_field="extra_key", takes_priority=True
)
TOKENS_IN = Endpoint("/inference/v1/generate", read_tokens, usage_of_completion, OPENAI_EVENTS, takes_priority=True)

INVOCATIONS = Endpoint("/invocations", read_invocation, usage_of_invocation, OPENAI_EVENTS)
BY_PREFIX = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE, TOKENS_IN, INVOCATIONS)

_BY_LOAD = (
    *("/v1/embeddings", "/v2/embed", "/encode", "/pooling", "/classify", "/v1/classify"),
    *("/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank"),
    *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"),
    *("/v1/images/generations", "/v1/images/edits", "/v1/moderations"),
)
_OF_TOKENS = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize")
ENDPOINTS: Mapping[str, Endpoint] = MappingProxyType(
    {
        endpoint.path: endpoint
        for endpoint in (
            *BY_PREFIX,
            COUNT_TOKENS,
            *map(Endpoint.of_any, _BY_LOAD),
            *(Endpoint.of_any(path, of_tokens=True) for path in _OF_TOKENS),
        )
    }
)
"""The endpoints, by path."""
NOT_PASSED = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/chat/completions/batch"})
"""The first two change one replica, so they are an operator's business with each of them. The last fills KV caches;
requests that are placed by load may not, for their tenants' caches would not be kept apart."""
_OF_ENGINES = re.compile(r"/v[12](/[A-Za-z0-9_-][A-Za-z0-9_.:-]*)+")
"""Plain segments only: what a replica's server or a proxy before it could read as another path is not passed."""
_TWICE = "/v1/v1/"
"""How a path begins if the client's base URL ends in `/v1` and should not."""
_OF_ANTHROPIC = "/v1/messages/"
OTHER = "other"
"""The label of every other path in metrics."""
ALIKE = 0.8
"""How much of a path, as difflib counts it, is as in the one that was probably meant."""


def nearest_path(path: str, paths: Iterable[str] = ENDPOINTS) -> str | None:
    """Return the path that a mistyped one resembles most, None if it resembles none.

    >>> nearest_path("/v1/chat/completion"), nearest_path("/v1/new")
    ('/v1/chat/completions', None)
    """
    return next(iter(get_close_matches(path, list(paths), 1, ALIKE)), None)


def endpoint_of(path: str) -> Endpoint | None:
    """Return the endpoint of a path to which requests are posted, None if they do not go to replicas.

    Other paths below `/v1/` and `/v2/` are placed by load, since engines may serve a model there. A slash at the end of
    a known path does not count.

    >>> endpoint_of("/v1/completions/") is COMPLETIONS, endpoint_of("/v1/new").by_load, endpoint_of("/v1/../sleep")
    (True, True, None)
    """
    if (endpoint := ENDPOINTS.get(path) or ENDPOINTS.get(path.removesuffix("/"))) is not None:
        return endpoint
    if _OF_ENGINES.fullmatch(path) is None or path.startswith(_TWICE) or path in NOT_PASSED:
        return None
    style = ErrorStyle.ANTHROPIC if path.startswith(_OF_ANTHROPIC) else ErrorStyle.OPENAI
    return Endpoint.of_any(path, style, label=OTHER)
