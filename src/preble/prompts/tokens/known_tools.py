"""Lists of tools, decoded: agents send the same ones with each request, and decoding them costs more than the rest."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

Tools = list[Any] | None


class KnownTools:
    """The lists that came last, by their JSON, the least recently used forgotten first. For several threads.

    Never takes more than `budget_bytes`, as estimated from the JSON.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._bytes = 0
        self._known: OrderedDict[bytes, Tools] = OrderedDict()
        self._lock = Lock()

    def get(self, raw: bytes) -> tuple[bool, Tools]:
        """Return whether a list is known, and the list."""
        with self._lock:
            if raw not in self._known:
                return False, None
            self._known.move_to_end(raw)
            return True, self._known[raw]

    def put(self, raw: bytes, tools: Tools) -> None:
        """Remember a list, unless it takes more than half of the budget."""
        if (size := decoded_bytes(raw)) > self._budget_bytes // 2:
            return
        with self._lock:
            if raw not in self._known:
                self._bytes += size
            self._known[raw] = tools
            while self._bytes > self._budget_bytes:
                self._bytes -= decoded_bytes(self._known.popitem(last=False)[0])


def decoded_bytes(raw: bytes) -> int:
    """Return the most that a list takes with its JSON. O(length).

    >>> decoded_bytes(b'[{"function": {}}]') > 800
    True
    """
    num_values = raw.count(b",") + raw.count(b":")
    return 5 * len(raw) + 60 * num_values + 300 * raw.count(b"{") + 100 * raw.count(b"[") + 200
