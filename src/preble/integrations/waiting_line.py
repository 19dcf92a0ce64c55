"""An engine's own list of waiting requests, kept in the order of core's `WaitingQueue`.

Engines keep the list and take requests from its head. So before each batch a plug-in shows the list and gets its new
order. Requests that have gone since the last time count as served, and their groups are charged for them. (A few have
been aborted instead; that costs their group a turn.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from preble.core.replica.waiting_queue import WaitingQueue
from preble.integrations.settings import OrderSettings

Waiting = TypeVar("Waiting")


class WaitingLine(Generic[Waiting]):
    """The order of one engine's waiting requests; `Waiting` is the engine's own type of them."""

    def __init__(
        self,
        settings: OrderSettings,
        *,
        num_tokens: Callable[[Waiting], int],
        cached_tokens: Callable[[Waiting], int],
        on_gone: Callable[[str], None],
    ) -> None:
        """`num_tokens`: of a new request. `cached_tokens`: how many of them are cached now; called for each request
        each time. `on_gone`: called with the id of each request that no longer waits."""
        self._num_tokens = num_tokens
        self._cached_tokens = cached_tokens
        self._on_gone = on_gone
        self._queue = WaitingQueue(self._cached_tokens_of, settings.order, settings.num_groups)
        self._waiting: Mapping[str, Waiting] = {}
        self._arranged: list[str] = []

    def __len__(self) -> int:
        """Return how many requests waited the last time."""
        return len(self._arranged)

    def max_picks(self, num_older: int) -> int | None:
        """Return `WaitingQueue.max_picks`: the most others served before a request; None for no bound."""
        return self._queue.max_picks(num_older)

    def arrange(self, waiting: Mapping[str, Waiting]) -> list[Waiting]:
        """Return the waiting requests (by id, new ones in order of arrival) in the order in which to serve them.

        O(waiting), with one call of `cached_tokens` for each.
        """
        known = self._waiting
        for item in [item for item in self._arranged if item not in waiting]:
            self._queue.take(item)
            self._on_gone(item)
        for item in [item for item in waiting if item not in known]:
            self._queue.add(item, self._num_tokens(waiting[item]))
        self._waiting = waiting
        self._queue.refresh()
        self._arranged = self._queue.in_order()
        return [waiting[item] for item in self._arranged]

    def _cached_tokens_of(self, item: str) -> int:
        return self._cached_tokens(self._waiting[item])
