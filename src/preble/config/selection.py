"""The selection service: how long what it gives out is held."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class SelectionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The selection service of `preble select`: docs/howto/selection-service.md."""

    lease_s: Annotated[float, Meta(gt=0, le=3600)] = 300.0
    """[s] How long a reservation lasts without a report, unless its caller asks for another time. Why: longer than most
    answers, for callers that report no progress."""
    hold_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """[s] How long a selection counts as load before it is reserved. Why: callers reserve as soon as they have sent the
    request."""
