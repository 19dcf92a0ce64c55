"""The time that a request spends at one replica, which can be cut short from outside."""

from __future__ import annotations

import asyncio
from types import TracebackType

from preble.core.types import ReplicaId
from preble.errors import EngineGone


class CancelScope:
    """A context, entered once. `withdraw` ends it: the work inside is cancelled, and leaving raises `EngineGone`.

    Everything in the task that has entered it.
    """

    __slots__ = ("_is_open", "_replica_id", "_scope", "_why")

    def __init__(self, replica_id: ReplicaId) -> None:
        self._replica_id = replica_id
        self._scope = asyncio.timeout(None)
        self._is_open = False
        self._why = ""

    async def __aenter__(self) -> CancelScope:
        await self._scope.__aenter__()
        self._is_open = True
        return self

    def withdraw(self, why: str) -> None:
        """End it; nothing happens if it has not begun or is over. `why`: after the replica's name in the error."""
        if self._is_open:
            self._is_open = False
            self._why = why
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as withdrawn:
            raise EngineGone(
                f"replica {self._replica_id} {self._why}", replica_id=self._replica_id, is_silent=True
            ) from withdrawn
