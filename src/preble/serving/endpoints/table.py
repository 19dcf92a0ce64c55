"""The table of endpoints: every path whose requests go to replicas."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from preble.serving.endpoints.answers import usage_of_completion
from preble.serving.endpoints.bodies import read_chat, read_completion
from preble.serving.endpoints.endpoint import Endpoint
from preble.serving.endpoints.events import OPENAI_EVENTS

COMPLETIONS = Endpoint("/v1/completions", read_completion, usage_of_completion, OPENAI_EVENTS)
CHAT = Endpoint("/v1/chat/completions", read_chat, usage_of_completion, OPENAI_EVENTS)

ENDPOINTS: Mapping[str, Endpoint] = MappingProxyType({endpoint.path: endpoint for endpoint in (COMPLETIONS, CHAT)})
"""By path."""


def endpoint_of(path: str) -> Endpoint | None:
    """Return the endpoint of a path, None if no requests to it go to replicas.

    >>> endpoint_of("/v1/completions") is COMPLETIONS, endpoint_of("/health")
    (True, None)
    """
    return ENDPOINTS.get(path)
