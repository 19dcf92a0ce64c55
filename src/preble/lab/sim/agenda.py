"""What happens next on the virtual clock: a heap of (time, priority, counter, event)."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count

Event = Callable[[float], None]
"""What happens; it is given the time at which it does, in seconds."""


class Priority(IntEnum):
    """The order of what happens in one instant.

    An iteration starts last, so that it takes in all that arrived by then; a sample shows the instant as it ended.
    """

    FLEET = 0
    ITERATION_END = 1
    REPORT = 2
    ARRIVAL = 3
    ITERATION_START = 4
    SAMPLE = 5


class Agenda:
    """Events to come. Those of one time and priority happen in the order in which they were put in.

    >>> agenda = Agenda()
    >>> agenda.at(1.0, Priority.SAMPLE, print)
    >>> agenda.at(1.0, Priority.FLEET, repr)
    >>> [agenda.pop()[1] is event for event in (repr, print)], len(agenda)
    ([True, True], 0)
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Event]] = []
        self._count = count()

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time_s: float, priority: Priority, event: Event) -> None:
        """Have `event` happen at `time_s`. O(log events)."""
        heappush(self._heap, (time_s, int(priority), next(self._count), event))

    def at_once(self, now: float, priority: Priority, event: Event) -> None:
        """Do as `at` for the time that it is: where nothing comes before `event`, it happens in this call."""
        if self._heap and self._heap[0][:2] <= (now, priority):
            self.at(now, priority, event)
        else:
            event(now)

    def pop(self) -> tuple[float, Event]:
        """Take out what happens next, with its time. Raises: IndexError: nothing is left."""
        time_s, _, _, event = heappop(self._heap)
        return time_s, event
