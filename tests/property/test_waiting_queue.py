"""WaitingQueue under any arrivals, removals and changes of hit ratios: each is served once, in bounded time."""

from __future__ import annotations

import copy

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from preble.core.replica.waiting_queue import QueueOrder, WaitingQueue, group_of

NUM_TOKENS = 100


class WaitingQueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cached: dict[str, int] = {}
        self.waiting: list[str] = []
        self.bound: dict[str, int | None] = {}
        self.returned: list[str] = []
        self.served: list[str] = []
        self.count = 0

    @initialize(order=st.sampled_from(QueueOrder), num_groups=st.integers(1, 4))
    def start(self, order: QueueOrder, num_groups: int) -> None:
        self.order = order
        self.num_groups = num_groups
        self.queue = WaitingQueue(self.cached.__getitem__, order, num_groups)

    @rule(cached=st.integers(0, NUM_TOKENS))
    def add(self, cached: int) -> None:
        item = f"r{self.count}"
        self.count += 1
        self.cached[item] = cached
        self.bound[item] = self.queue.max_picks(len(self.waiting))
        self.waiting.append(item)
        self.queue.add(item, NUM_TOKENS)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), cached=st.integers(0, NUM_TOKENS))
    def change_hit_ratio(self, data: st.DataObject, cached: int) -> None:
        self.cached[data.draw(st.sampled_from(self.waiting))] = cached

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(item)
        self.queue.remove(item)

    @precondition(lambda self: self.served)
    @rule()
    def put_back(self) -> None:
        item = self.served.pop()
        self.returned.insert(0, item)
        self.queue.put_back(item)

    @rule()
    def peeking_changes_nothing(self) -> None:
        self.queue.refresh()
        assert self.queue.peek() == self.queue.peek()

    @precondition(lambda self: self.waiting or self.returned)
    @rule()
    def pick(self) -> None:
        self.queue.refresh()
        expected = self.queue.peek()
        item = self.queue.pop()
        assert item == expected
        if self.returned:
            assert item == self.returned.pop(0), "what was put back comes first"
            return
        self.check_order(item)
        self.waiting.remove(item)
        self.served.append(item)
        for other in self.waiting:
            bound = self.bound[other]
            if bound is not None:
                assert bound > 1, f"{other} waits longer than it may"
                self.bound[other] = bound - 1

    @rule()
    def the_order_told_is_the_order_of_pops(self) -> None:
        self.queue.refresh()
        told = self.queue.in_order()
        trial = copy.deepcopy(self.queue)
        assert [trial.pop() for _ in range(len(trial))] == told

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def take_out_of_turn(self, data: st.DataObject) -> None:
        self.queue.refresh()
        item = data.draw(st.sampled_from(self.waiting))
        self.queue.take(item)
        self.waiting.remove(item)
        self.served.append(item)
        # Nothing is promised to those whom somebody else passes over.
        self.bound = dict.fromkeys(self.bound)

    def check_order(self, item: str) -> None:
        if self.order is QueueOrder.FCFS:
            assert item == self.waiting[0]
        elif self.order is QueueOrder.LPM:
            assert item == max(self.waiting, key=self.cached.__getitem__)
        else:
            group = group_of(self.cached[item], NUM_TOKENS, self.num_groups)
            same = [i for i in self.waiting if group_of(self.cached[i], NUM_TOKENS, self.num_groups) == group]
            assert item in (same[0], self.waiting[0]), "first come, first served inside a group"

    @invariant()
    def holds_exactly_what_waits(self) -> None:
        if self.count:
            assert list(self.queue) == [*self.returned, *self.waiting]
            assert len(self.queue) == len(self.returned) + len(self.waiting)


TestWaitingQueue = WaitingQueueMachine.TestCase


def most_hostile_group(queue: WaitingQueue, cached: dict[str, int], victim: str) -> None:
    """Give `victim` a hit ratio with which it is not served next, if there is one."""
    for hits in (0, 25, 50, 75):
        cached[victim] = hits
        queue.refresh()
        if queue.peek() != victim:
            return


def test_a_stream_of_hits_and_a_hostile_cache_cannot_starve_a_request() -> None:
    """The adversary moves the victim out of each turn and feeds every group without end; the bound still holds."""
    cached: dict[str, int] = {}
    queue = WaitingQueue(cached.__getitem__, QueueOrder.GROUPS, num_groups=4)
    items = ["older", "victim", *(f"other{i}" for i in range(40))]
    for i, item in enumerate(items):
        cached[item] = 25 * (i % 4)
        queue.add(item, NUM_TOKENS)
    bound = queue.max_picks(num_older=1)
    assert bound is not None
    for picks in range(1, bound + 1):
        most_hostile_group(queue, cached, "victim")
        picked = queue.pop()
        if picked == "victim":
            break
        cached[f"new{picks}"] = cached[picked]
        queue.add(f"new{picks}", NUM_TOKENS)
    assert picked == "victim", f"still waiting after {picks} picks"
