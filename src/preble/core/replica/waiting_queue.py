"""The order in which waiting requests are served: first come, longest prefix first, or priority groups.

It knows ids, lengths and a function that returns how many tokens are cached. It knows nothing about blocks, batches or
engines, so it can order the queue of any engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence, Sized
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import TypeVar

Group = TypeVar("Group", bound=Sized)


class QueueOrder(StrEnum):
    """How waiting requests are ordered."""

    FCFS = "fcfs"
    """First come, first served."""
    LPM = "lpm"
    """Most cached tokens first. A request without cached tokens may wait forever."""
    GROUPS = "groups"
    """Preble's priority groups by hit ratio: hits first, and no request waits forever."""


def group_of(cached_tokens: int, num_tokens: int, num_groups: int) -> int:
    """Return the priority group of a request, 0 ... num_groups - 1. Source: Preble, Algorithm 3.

    >>> group_of(63, 100, 10), group_of(60, 100, 10), group_of(100, 100, 10), group_of(0, 100, 10)
    (6, 6, 9, 0)
    """
    return min(cached_tokens * num_groups // num_tokens, num_groups - 1)


class _Round:
    """One round of picks: how many each group has had, and the request that must be served by its end.

    Group g is served, highest group first, until it has had its share of g + 1 picks. An empty group keeps its share,
    so that the others keep their proportion: a request that joins a high group later in the round finds picks left.
    Source: docs/decisions/0007.
    """

    __slots__ = ("num_picks", "oldest")

    def __init__(self, num_groups: int, oldest: str) -> None:
        self.num_picks = [0] * num_groups
        self.oldest = oldest

    def next_group(self, groups: Sequence[Sized]) -> int | None:
        """Return the highest group with a request and picks left; None if the round is over. O(groups)."""
        for group in reversed(range(len(groups))):
            if groups[group] and self.num_picks[group] <= group:
                return group
        return None

    def picks_left(self, groups: Sequence[Group]) -> Iterator[tuple[Group, int]]:
        """Yield the groups, highest first, each with the number of its requests that this round still serves if none
        comes or changes groups.

        A round only goes down: a group that it leaves is empty or has had its share. O(groups).
        """
        for group in reversed(range(len(groups))):
            if groups[group]:
                yield groups[group], min(len(groups[group]), max(group + 1 - self.num_picks[group], 0))


@dataclass(frozen=True, slots=True)
class _Pick:
    """The next request. `lane`: where it waits at the head, None if it is overdue. `round`: the round that it counts
    in.
    """

    item: str
    lane: int | None
    round: _Round | None


def shares(num_groups: int) -> int:
    """Picks in one round: 1 + 2 + ... + num_groups; 55 for ten groups."""
    return num_groups * (num_groups + 1) // 2


class WaitingQueue:
    """Waiting requests, and which is next.

    `cached_tokens(id)` returns how many leading tokens of a waiting request are cached now. `refresh` calls it once for
    each request, so that the order is fixed between two refreshes; call `refresh` before each batch.

    GROUPS serves in rounds. A round gives group g a share of g + 1 picks, highest group first, and ends when every
    group is empty or has had its share; inside a group the oldest is first. If the request that was the
    oldest at the start of a round still waits at its end (it changed groups and missed its turn), it is served next. So
    a request with k older ones is served within `max_picks(k)` picks, however hit ratios change.
    """

    def __init__(
        self,
        cached_tokens: Callable[[str], int],
        order: QueueOrder = QueueOrder.GROUPS,
        num_groups: int = 10,
    ) -> None:
        if num_groups < 1:
            raise ValueError(f"a queue needs at least 1 group, got {num_groups}")
        self._cached_tokens = cached_tokens
        self._order = QueueOrder(order)  # a plain "lpm" would count as an unknown order, which is FCFS
        self._num_groups = num_groups if self._order is QueueOrder.GROUPS else 1
        self._num_tokens: dict[str, int] = {}
        """Waiting requests and their lengths, oldest first."""
        self._returned: deque[str] = deque()
        self._lanes: list[deque[str]] = [deque() for _ in range(self._num_groups)]
        self._round: _Round | None = None

    def __len__(self) -> int:
        return len(self._num_tokens) + len(self._returned)

    def __contains__(self, item: str) -> bool:
        return item in self._num_tokens or item in self._returned

    def __iter__(self) -> Iterator[str]:
        """Return waiting ids: first those that were put back, then the oldest first."""
        return chain(self._returned, self._num_tokens)

    def max_picks(self, num_older: int) -> int | None:
        """Return the most picks (of requests not put back) until a request with `num_older` older ones is served.

        None if there is no bound (LPM). For GROUPS: the rest of the running round, then one round for each older
        request and for itself, since each round serves the request that was the oldest at its start.
        """
        if self._order is QueueOrder.LPM:
            return None
        if self._order is QueueOrder.FCFS:
            return num_older + 1
        return (num_older + 2) * (shares(self._num_groups) + 1)

    def add(self, item: str, num_tokens: int) -> None:
        """Append a request of `num_tokens` (at least 1). It can be picked after the next `refresh`. O(1)."""
        if item in self:
            raise ValueError(f"{item!r} waits already")
        if num_tokens < 1:
            raise ValueError(f"{item!r} has {num_tokens} tokens; at least 1 is needed")
        self._num_tokens[item] = num_tokens

    def put_back(self, item: str) -> None:
        """Put a request that was picked and then preempted in front of all others. O(1)."""
        if item in self:
            raise ValueError(f"{item!r} waits already")
        self._returned.appendleft(item)

    def remove(self, item: str) -> None:
        """Remove a request that is not served. O(waiting). Raises: KeyError: it does not wait."""
        if item in self._returned:
            self._returned.remove(item)
            return
        del self._num_tokens[item]
        self._drop_from_lanes(item)

    def refresh(self) -> None:
        """Order all waiting requests by what is cached now. O(waiting); for LPM O(waiting log waiting)."""
        if self._order is QueueOrder.GROUPS:
            for lane in self._lanes:
                lane.clear()
            for item, num_tokens in self._num_tokens.items():
                self._lanes[group_of(self._cached_tokens(item), num_tokens, self._num_groups)].append(item)
        elif self._order is QueueOrder.LPM:
            self._lanes[0] = deque(sorted(self._num_tokens, key=lambda item: -self._cached_tokens(item)))
        else:
            self._lanes[0] = deque(self._num_tokens)

    def peek(self) -> str | None:
        """Return the request that `pop` would return; None if none has been ordered. Changes nothing."""
        if self._returned:
            return self._returned[0]
        pick = self._next_pick()
        return pick.item if pick else None

    def pop(self) -> str:
        """Remove the next request and return it. Raises: IndexError: none has been ordered."""
        if self._returned:
            return self._returned.popleft()
        pick = self._next_pick()
        if pick is None:
            raise IndexError("no request has been ordered; call refresh after adding")
        del self._num_tokens[pick.item]
        if pick.lane is None:
            self._drop_from_lanes(pick.item)
            self._round = None
            return pick.item
        self._lanes[pick.lane].popleft()
        if pick.round is not None:
            pick.round.num_picks[pick.lane] += 1
        self._round = pick.round if self._num_tokens else None
        return pick.item

    def in_order(self) -> list[str]:
        """Return all ordered requests as successive pops would return them. Changes nothing. O(waiting).

        For an engine that keeps its own queue and takes from its head. It reports what it took with `take`.
        """
        if self._order is not QueueOrder.GROUPS:
            return [*self._returned, *self._lanes[0]]
        if not any(self._lanes):
            return [*self._returned]
        return [*self._returned, *_laid_out(self._lanes, self._round or self._new_round(), self._num_tokens)]

    def take(self, item: str) -> None:
        """Remove a request that is served now, even if it is not the next one; the pick counts for its group.

        Remove requests that can no longer be served: each time a group's turn comes to one, the other requests of the
        group lose the turn. Raises: KeyError: it does not wait.
        """
        if item == self.peek():
            self.pop()
            return
        lane = self._lane_of(item)
        self.remove(item)
        if lane is not None and self._order is QueueOrder.GROUPS and self._num_tokens:
            self._round = self._round or self._new_round()
            self._round.num_picks[lane] += 1

    def _drop_from_lanes(self, item: str) -> None:
        if (lane := self._lane_of(item)) is not None:
            self._lanes[lane].remove(item)

    def _lane_of(self, item: str) -> int | None:
        return next((i for i, lane in enumerate(self._lanes) if item in lane), None)

    def _next_pick(self) -> _Pick | None:
        if not any(self._lanes):
            return None
        if self._order is not QueueOrder.GROUPS:
            return _Pick(self._lanes[0][0], 0, None)
        return (self._round and self._pick_of(self._round)) or self._pick_of(self._new_round())

    def _new_round(self) -> _Round:
        return _Round(self._num_groups, oldest=next(iter(self._num_tokens)))

    def _pick_of(self, current: _Round) -> _Pick | None:
        """Return the next pick of a round; None if it is over and its oldest request has been served."""
        lane = current.next_group(self._lanes)
        if lane is not None:
            return _Pick(self._lanes[lane][0], lane, current)
        return _Pick(current.oldest, None, current) if current.oldest in self._num_tokens else None


def _laid_out(lanes: Sequence[deque[str]], current: _Round, waiting: Collection[str]) -> Iterator[str]:
    """Yield the requests that rounds serve until every lane is empty, from the rest of the current round on.

    `waiting`: the oldest first, as in each lane; so the oldest of all is at the head of its lane.
    """
    lanes = [lane.copy() for lane in lanes]
    by_age = iter(waiting)
    served: set[str] = set()
    while sum(map(bool, lanes)) > 1:
        picks = [lane.popleft() for lane, count in current.picks_left(lanes) for _ in range(count)]
        served.update(picks)
        yield from picks
        if current.oldest in waiting and current.oldest not in served:
            served.add(current.oldest)
            yield next(lane for lane in lanes if lane and lane[0] == current.oldest).popleft()
        if any(lanes):
            current = _Round(len(lanes), next(item for item in by_age if item not in served))
    # One lane is left, and the oldest is at its head: whatever the rounds, the lane is served in its order.
    yield from chain.from_iterable(lanes)
