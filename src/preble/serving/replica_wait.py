"""Requests wait here while no replica takes any: all replicas of a small fleet may be restarting."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from preble.serving.replicas.live import LiveReplica, LiveReplicas

_LEAVES_S = 2.0
"""A replica that has just broken off is checked at once: if it is gone, it has left the rotation within this time."""


class ReplicaWait:
    """Lets requests wait, first come first served, until a replica takes requests. Use it within one event loop.

    They have been admitted, so `limits.max_in_flight` and the memory for bodies bound them. `num_waiting`: how many.
    """

    def __init__(self, replicas: LiveReplicas, longest_s: float) -> None:
        """`longest_s`: how long a request waits; 0 for not at all."""
        self.num_waiting = 0
        self._replicas = replicas
        self._longest_s = longest_s
        self._stopped = asyncio.get_running_loop().create_future()

    def configure(self, longest_s: float) -> None:
        """Let requests that come from now on wait for so long."""
        self._longest_s = longest_s

    def stop(self) -> None:
        """Let nobody wait any more: this process ends."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def over(self, tried: Collection[LiveReplica] = ()) -> bool:
        """Wait until a replica takes requests. Return False if none does in time, or without a wait if one does now.

        `tried`: replicas that have just broken off or refused a connection. They may be about to leave, and do not
        count.
        """
        if self._longest_s <= 0 or self._is_over(tried):
            return False
        loop = asyncio.get_running_loop()
        began_at, longest_s = loop.time(), self._longest_s
        self.num_waiting += 1
        try:
            await asyncio.sleep(0)  # see `run_until_wait`
            while not self._is_over(tried):
                most_s = min(longest_s, _LEAVES_S) if self._replicas.num_taking else longest_s
                left_s = began_at + most_s - loop.time()
                if left_s <= 0 or self._stopped.done():
                    return False
                changes = {self._replicas.next_change(), self._stopped}
                await asyncio.wait(changes, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            return True
        finally:
            self.num_waiting -= 1

    def _is_over(self, tried: Collection[LiveReplica]) -> bool:
        return (self._replicas.num_able(tried) if tried else self._replicas.num_taking) > 0
