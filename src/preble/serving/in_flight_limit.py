"""The limit of prompts served at once, shared by tenants and keys."""

from __future__ import annotations

import asyncio
from collections import Counter

from preble.config import LimitsConfig
from preble.errors import Overloaded, RequestError
from preble.rules.callers import Caller
from preble.rules.key_limits import KeyLimits
from preble.serving.intake import Admission
from preble.serving.requests import ParsedRequest
from preble.serving.terms import Terms

_TIMES_WHAT_IS_FREE = 4
"""A tenant may have up to this many times as many prompts as there is room for more: none can take all the room."""


class InFlightLimit:
    """Admits requests while there is room for all their prompts, and for more of their tenant and key.

    A prompt counts as often as it is to be answered.
    """

    def __init__(self, limits: LimitsConfig, key_limits: KeyLimits) -> None:
        self._limits = limits
        self._key_limits = key_limits
        self._of_tenant: Counter[str] = Counter()
        self.num_admitted = 0
        """Prompts between admission and the end of their answer."""

    def configure(self, limits: LimitsConfig) -> None:
        """Admit within these limits from now on."""
        self._limits = limits

    def enter(self, terms: Terms, *, again: bool = False) -> None:
        """Admit a request; the caller gives its room back with `leave`. `again`: it was admitted elsewhere before, and
        counts even if there is no room.

        Raises: Overloaded: there is no room now. RequestError: there never is.
        """
        caller, count = terms.caller, terms.num_answers
        if not again:
            self._require_room(caller, count)
        if caller.limits is not None:
            if again:
                self._key_limits.admit_again(caller, count)
            else:
                self._key_limits.admit(caller, count, asyncio.get_running_loop().time())
        self.num_admitted += count
        self._of_tenant[caller.tenant] += count

    def leave(self, terms: Terms) -> None:
        """An admitted request is over."""
        caller, count = terms.caller, terms.num_answers
        self.num_admitted -= count
        self._of_tenant[caller.tenant] -= count
        if caller.limits is not None:
            self._key_limits.release(caller, count)

    def _require_room(self, caller: Caller, count: int) -> None:
        room = self._limits.max_in_flight
        if count > room:
            raise RequestError(f"{count} answers are asked for; at most {room} are given at once", param="prompt")
        if self.num_admitted + count > room:
            raise Overloaded(
                f"{self.num_admitted} prompts are being served, which is the limit; try again soon",
                retry_after_s=self._limits.retry_after_s,
            )
        if caller.tenant:
            self._require_room_of_tenant(caller, count, room - self.num_admitted)

    def _require_room_of_tenant(self, caller: Caller, count: int, free: int) -> None:
        served = self._of_tenant[caller.tenant]
        if served + count > _TIMES_WHAT_IS_FREE * free:
            raise Overloaded(
                f"{served} prompts of this tenant are being served; the rest of the room is for others; try again soon",
                retry_after_s=self._limits.retry_after_s,
            )


class Admitted(Admission):
    """The admission of one request in this process."""

    __slots__ = ("_limit", "_parsed", "_terms")

    def __init__(self, limit: InFlightLimit, parsed: ParsedRequest) -> None:
        self._limit = limit
        self._parsed = parsed
        self._terms = parsed.terms

    async def enter(self) -> ParsedRequest:
        self._limit.enter(self._terms)
        return self._parsed

    def leave(self) -> None:
        self._limit.leave(self._terms)
