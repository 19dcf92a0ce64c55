"""What placing needs to know of a client's request besides its token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from preble.errors import RequestError
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


def rank_of(terms: Terms, classes: Sequence[str]) -> int:
    """Return the place of a request's class among `classes`: the one that the header names, else the body's
    `service_tier`; never before the class of the key.

    Raises: RequestError: there is no class of the name in the header.
    """
    key = terms.caller.limits
    best = classes.index(key.priority) if key is not None and key.priority is not None else 0
    if (name := terms.priority) is None:
        return max(best, classes.index(terms.tier)) if terms.tier in classes else best
    if name not in classes:
        raise RequestError(f"{PRIORITY.decode()}: {name[:50]!r} is none of {', '.join(classes)}")
    return max(best, classes.index(name))
