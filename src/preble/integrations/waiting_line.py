"""An engine's own list of waiting requests, kept in the order of core's `WaitingQueue`.

Engines keep the list themselves and take from its head. So before each batch a plug-in shows what waits, and gets the
order in which to leave it. What has gone since it was last shown has been served, and its group is charged for it. (A
few have been aborted instead; taking them for served costs their group a turn.)
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
        """`num_tokens`: of a request when it comes. `cached_tokens`: how many of them are cached now; asked for each
        request of each arrangement. `on_gone`: called with the id of each that waits no longer."""
        self._num_tokens = num_tokens
        self._cached_tokens = cached_tokens
        self._on_gone = on_gone
        self._queue = WaitingQueue(self._cached_tokens_of, settings.order, settings.num_groups)
        self._waiting: Mapping[str, Waiting] = {}
        self._arranged: list[str] = []

    def __len__(self) -> int:
        """How many waited when they were last arranged."""
        return len(self._arranged)

    def max_picks(self, num_older: int) -> int | None:
        """As `WaitingQueue.max_picks`: after how many others a request is served at the latest; None for no bound."""
        return self._queue.max_picks(num_older)

    def arrange(self, waiting: Mapping[str, Waiting]) -> list[Waiting]:
        """The waiting requests (by id, new ones in the order of their arrival) in the order in which to serve them.

        O(waiting), and one `cached_tokens` for each.
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
