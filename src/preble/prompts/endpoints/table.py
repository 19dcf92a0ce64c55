"""The table of endpoints: every path whose requests go to replicas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from preble.prompts.endpoints.answers import usage_of_completion
from preble.prompts.endpoints.anthropic import (
    MESSAGE_EVENTS,
    read_count,
    read_messages,
    usage_of_count,
    usage_of_message,
)
from preble.prompts.endpoints.bodies import TEXT_OF_COMPLETION, read_chat, read_completion
from preble.prompts.endpoints.by_load import read_invocation, usage_of_invocation
from preble.prompts.endpoints.endpoint import Endpoint
from preble.prompts.endpoints.errors import ErrorStyle
from preble.prompts.endpoints.events import OPENAI_EVENTS
from preble.prompts.endpoints.generate import GENERATE_EVENTS, read_generate, read_tokens, usage_of_generated
from preble.prompts.endpoints.responses import RESPONSE_EVENTS, RESPONSE_ID, read_response, usage_of_response

COMPLETIONS = Endpoint(
    "/v1/completions", read_completion, usage_of_completion, OPENAI_EVENTS, text_start=TEXT_OF_COMPLETION
)
CHAT = Endpoint("/v1/chat/completions", read_chat, usage_of_completion, OPENAI_EVENTS)
RESPONSES = Endpoint(
    "/v1/responses",
    read_response,
    usage_of_response,
    RESPONSE_EVENTS,
    ErrorStyle.RESPONSES,
    answer_id=RESPONSE_ID,
)
MESSAGES = Endpoint("/v1/messages", read_messages, usage_of_message, MESSAGE_EVENTS, ErrorStyle.ANTHROPIC)
COUNT_TOKENS = Endpoint(
    "/v1/messages/count_tokens", read_count, usage_of_count, MESSAGE_EVENTS, ErrorStyle.ANTHROPIC, salt_field=""
)
GENERATE = Endpoint("/generate", read_generate, usage_of_generated, GENERATE_EVENTS, salt_field="extra_key")
TOKENS_IN = Endpoint("/inference/v1/generate", read_tokens, usage_of_completion, OPENAI_EVENTS)

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
