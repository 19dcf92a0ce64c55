"""A placement as rules follow it."""

from __future__ import annotations

from typing import Protocol

from preble.core.types import Placement, Request
from preble.rules.callers import Caller


class OnTerms(Protocol):
    """Who sent the request, and whether its answer is streamed."""

    @property
    def caller(self) -> Caller: ...
    @property
    def streams(self) -> bool: ...


class Followed(Protocol):
    """Where the request is now, and on which terms. `has_begun`: its first token has come. `stalls`: its replica is
    ejected because it begins no answer."""

    request: Request
    placed_at: float
    has_begun: bool
    stalls: bool

    @property
    def placement(self) -> Placement: ...
    @property
    def terms(self) -> OnTerms: ...
