"""What placing needs to know of a client's request besides its token ids."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from preble.rules.callers import ANYBODY, Caller

PRIORITY = b"x-preble-priority"
MAX_WAIT = b"x-preble-max-wait"
MonotonicSeconds = Annotated[float, Meta(ge=0, le=1e12)]
"""A time of the event loop's clock."""


class Terms(Struct, frozen=True, array_like=True):
    """Who sends a request, and on which terms it is placed. `request_id`: of the whole request, however many prompts.
    `num_answers`: to all of its prompts.

    `priority`, `max_wait`: the headers as the client sent them. `tier`: the body's `service_tier`.
    `arrived_at`: when the whole request had arrived, by the event loop's clock; None if unknown.
    `is_traced`: whether the carrier wants to know the candidates of its placements.
    """

    request_id: str
    num_answers: Annotated[int, Meta(ge=1)] = 1
    model: str | None = None
    streams: bool = True
    caller: Caller = ANYBODY
    priority: str | None = None
    max_wait: str | None = None
    tier: str | None = None
    arrived_at: MonotonicSeconds | None = None
    is_traced: bool = False
