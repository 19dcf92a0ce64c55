"""Where a request goes next, with a wait while there is no replica at all."""

from __future__ import annotations

from preble.core.types import Request
from preble.errors import NoReplicaError
from preble.serving import (
    Intake,
    LiveReplica,
    ParsedRequest,
    Placed,
)


class Placing:
    """Places one request, and places it again. Where no replica takes requests, it waits for one."""

    def __init__(self, serving: Intake, request: Request, parsed: ParsedRequest) -> None:
        self._serving = serving
        self._request = request
        self._parsed = parsed
        self._tried: list[LiveReplica] = []

    async def place(self) -> Placed:
        """Raises: as `Intake.place`."""
        while True:
            try:
                return await self._serving.place(self._request, self._parsed)
            except NoReplicaError:
                if not await self._serving.replica_wait.over():
                    raise

    async def place_again(self, placed: Placed, *, is_gone: bool) -> Placed:
        """Place the request on another replica than that of `placed`, which has ended.

        `is_gone`: that replica refused the connection or broke off. If it was the last one, the next that comes gets
        the request, perhaps the same one after a restart. Raises: as `Placed.place_again`, and `Intake.place`.
        """
        if (tried := self._serving.replicas.get(placed.placement.replica_id)) is not None:
            self._tried.append(tried)
        try:
            return await placed.place_again()
        except NoReplicaError:
            if not is_gone or not await self._serving.replica_wait.over(self._tried):
                raise
        return await self.place()
