"""Leases: names with a deadline that each renewal puts off. Time is an argument."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

_FEW = 64
"""Entries that are not worth clearing up."""


class Leases:
    """Names and when each one expires. O(log names) a change; a renewal is O(1). Memory: O(names)."""

    def __init__(self) -> None:
        self._deadlines: dict[str, float] = {}
        self._due: list[tuple[float, str]] = []
        """At least one entry for each name, at its deadline or earlier."""

    def __contains__(self, name: str) -> bool:
        return name in self._deadlines

    def __len__(self) -> int:
        return len(self._deadlines)

    def hold(self, name: str, until: float) -> None:
        """A name expires at `until`, whether it is new or held already."""
        known = self._deadlines.get(name)
        self._deadlines[name] = until
        if known is None or until < known:
            heappush(self._due, (until, name))
            self._clear_up()

    def release(self, name: str) -> None:
        """A name does not expire any more. Raises: KeyError: it is not held."""
        del self._deadlines[name]
        self._clear_up()

    def next_at(self) -> float | None:
        """Return when to look for expired names next: no later than the first one's deadline. None: there are none."""
        self._drop_old()
        return self._due[0][0] if self._due else None

    def expire(self, now: float) -> list[str]:
        """Release the names whose deadline has come, and return them."""
        expired = []
        while (due := self.next_at()) is not None and due <= now:
            name = heappop(self._due)[1]
            del self._deadlines[name]
            expired.append(name)
        return expired

    def _clear_up(self) -> None:
        """Keep no more entries of ended leases than of held ones: a lease of an hour may end within a second."""
        if len(self._due) > 2 * len(self._deadlines) + _FEW:
            self._due = [(deadline, name) for name, deadline in self._deadlines.items()]
            heapify(self._due)

    def _drop_old(self) -> None:
        """Have the first entry tell a held name's deadline."""
        while self._due:
            at, name = self._due[0]
            deadline = self._deadlines.get(name)
            if deadline == at:
                return
            heappop(self._due)
            if deadline is not None and deadline > at:
                heappush(self._due, (deadline, name))
