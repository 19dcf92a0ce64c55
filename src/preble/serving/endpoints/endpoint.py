"""What is known of an endpoint: how to read its bodies, its answers and its streams, and which form its errors have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from preble.serving.endpoints.answers import Usage
from preble.serving.endpoints.bodies import Fields, PromptLimits
from preble.serving.endpoints.errors import ErrorStyle
from preble.serving.endpoints.events import EventForm, StreamMeter


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint of the engines whose requests are placed.

    `read`: the fields of a body that placing needs; raises RequestError. `usage`: of a whole answer, None if it reports
    none; raises EngineProtocolError if it is no answer of this endpoint. `events`: how it streams.
    """

    path: str
    read: Callable[[bytes, PromptLimits], Fields]
    usage: Callable[[bytes], Usage | None]
    events: EventForm
    errors: ErrorStyle = ErrorStyle.OPENAI

    def meter(self) -> StreamMeter:
        """Return the meter of one streamed answer."""
        return StreamMeter(self.events)
