"""How many prompts are served at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from preble.config import LimitsConfig
from preble.errors import Overloaded, RequestError
from preble.serving.requests import ParsedRequest
from preble.serving.telemetry.metrics import Telemetry


class Admission:
    """Admits requests while there is room for all their prompts."""

    def __init__(self, limits: LimitsConfig, telemetry: Telemetry) -> None:
        self._limits = limits
        self._telemetry = telemetry
        self.num_admitted = 0
        """Prompts between admission and the end of their answer."""

    @asynccontextmanager
    async def admitted(self, parsed: ParsedRequest) -> AsyncIterator[None]:
        """Raises: Overloaded: there is no room now. RequestError: there never is."""
        room, count = self._limits.max_in_flight, parsed.num_prompts
        if count > room:
            raise RequestError(f"`prompt` has {count} prompts; at most {room} are accepted", param="prompt")
        if self.num_admitted + count > room:
            raise Overloaded(
                f"{self.num_admitted} prompts are being served, which is the limit; try again soon",
                retry_after_s=self._limits.retry_after_s,
            )
        self.num_admitted += count
        self._telemetry.waiting.inc(count)
        try:
            yield
        finally:
            self.num_admitted -= count
            self._telemetry.waiting.dec(count)
