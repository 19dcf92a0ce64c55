"""WaitingQueue: three orders, proportions of priority groups, what is put back."""

from __future__ import annotations

from collections import Counter

import pytest

from preble.core.replica.waiting_queue import QueueOrder, WaitingQueue, group_of


def filled(order: QueueOrder, cached: dict[str, int], num_groups: int = 10) -> WaitingQueue:
    """A refreshed queue of prompts of 100 tokens, in the order of `cached`."""
    queue = WaitingQueue(cached.__getitem__, order, num_groups)
    for item in cached:
        queue.add(item, 100)
    queue.refresh()
    return queue


def drain(queue: WaitingQueue) -> list[str]:
    picked = []
    while (item := queue.peek()) is not None:
        assert queue.pop() == item
        picked.append(item)
    return picked


def test_fcfs_serves_in_the_order_of_arrival() -> None:
    assert drain(filled(QueueOrder.FCFS, {"a": 0, "b": 99, "c": 50})) == ["a", "b", "c"]


def test_lpm_serves_the_longest_cached_prefix_first_and_ties_by_arrival() -> None:
    assert drain(filled(QueueOrder.LPM, {"a": 0, "b": 50, "c": 99, "d": 50})) == ["c", "b", "d", "a"]


def test_groups_serve_hits_before_misses_and_fcfs_inside_a_group() -> None:
    cached = {"cold": 0, "warm": 63, "hot1": 96, "hot2": 91}
    assert drain(filled(QueueOrder.GROUPS, cached)) == ["hot1", "hot2", "warm", "cold"]


@pytest.mark.plain  # the compiled class refuses what is no QueueOrder, with a TypeError
def test_an_order_is_known_by_its_name_too() -> None:
    queue = filled("lpm", {"a": 0, "b": 50})  # type: ignore[arg-type]
    assert drain(queue) == ["b", "a"]
    with pytest.raises(ValueError, match="'fair'"):
        WaitingQueue(lambda item: 0, "fair")  # type: ignore[arg-type]


@pytest.mark.parametrize(("cached", "group"), [(0, 0), (9, 0), (10, 1), (63, 6), (60, 6), (99, 9), (100, 9)])
def test_the_group_is_the_floor_of_hit_ratio_times_groups(cached: int, group: int) -> None:
    assert group_of(cached, 100, 10) == group


def test_a_round_of_full_groups_picks_in_proportion_to_group_plus_one() -> None:
    cached = {f"{group}.{i}": group * 10 for i in range(20) for group in range(10)}
    queue = filled(QueueOrder.GROUPS, cached)
    picks = Counter(queue.pop().split(".")[0] for _ in range(55))
    assert picks == {str(group): group + 1 for group in range(10)}


def test_groups_with_nobody_in_them_leave_the_others_their_proportion() -> None:
    cached = {"top": 95} | {f"mid{i}": 85 for i in range(50)} | {f"low{i}": 5 for i in range(50)}
    queue = filled(QueueOrder.GROUPS, cached)
    picks = [queue.pop()[:3] for _ in range(31)]
    # Group 9 has only one; after it, in each round, nine of group 8 for one of group 0.
    assert picks == ["top", *["mid"] * 9, "low", *["mid"] * 9, "low", *["mid"] * 9, "low"]


def test_hits_and_misses_that_both_wait_are_served_ten_to_one() -> None:
    queue = filled(QueueOrder.GROUPS, {f"{kind}{i}": cached for i in range(60) for kind, cached in KINDS.items()})
    picks = Counter(queue.pop()[:3] for _ in range(44))
    assert picks == {"hit": 40, "mis": 4}


KINDS = {"mis": 0, "hit": 95}


def test_a_hit_that_arrives_amid_misses_is_served_next() -> None:
    cached = {f"miss{i}": 0 for i in range(100)}
    queue = filled(QueueOrder.GROUPS, cached)
    assert {queue.pop()[:4] for _ in range(20)} == {"miss"}
    cached["hit"] = 95
    queue.add("hit", 100)
    queue.refresh()
    assert queue.pop() == "hit"


def test_an_empty_queue_starts_a_new_round() -> None:
    cached = {"a": 95, "b": 95, "miss": 0}
    queue = WaitingQueue(cached.__getitem__, QueueOrder.GROUPS, 2)
    for items in (["a", "b"], ["a", "b", "miss"]):
        for item in items:
            queue.add(item, 100)
        queue.refresh()
        assert drain(queue) == items


def test_a_request_put_back_comes_before_all_others() -> None:
    queue = filled(QueueOrder.GROUPS, {"a": 95, "b": 95})
    assert queue.pop() == "a"
    queue.put_back("a")
    queue.refresh()
    assert list(queue) == ["a", "b"]
    assert drain(queue) == ["a", "b"]


def test_the_last_one_put_back_is_the_first_one_served() -> None:
    queue = filled(QueueOrder.FCFS, {"old": 0, "new": 0, "waiting": 0})
    assert [queue.pop(), queue.pop()] == ["old", "new"]
    queue.put_back("new")
    queue.put_back("old")
    assert drain(queue) == ["old", "new", "waiting"]


def test_the_current_hit_ratio_counts_from_the_next_refresh_on() -> None:
    cached = {"a": 0, "b": 50}
    queue = filled(QueueOrder.GROUPS, cached)
    cached["a"] = 99
    assert queue.peek() == "b"
    queue.refresh()
    assert queue.peek() == "a"


def test_an_added_request_takes_part_after_a_refresh() -> None:
    queue = WaitingQueue(lambda item: 0, QueueOrder.FCFS)
    queue.add("a", 1)
    assert queue.peek() is None
    with pytest.raises(IndexError, match="call refresh"):
        queue.pop()
    queue.refresh()
    assert queue.pop() == "a"


@pytest.mark.parametrize("order", list(QueueOrder))
def test_a_removed_request_is_not_served(order: QueueOrder) -> None:
    queue = filled(order, {"a": 10, "b": 20, "c": 30})
    queue.remove("b")
    assert "b" not in queue
    assert len(queue) == 2
    assert sorted(drain(queue)) == ["a", "c"]


def test_a_request_put_back_can_be_removed() -> None:
    queue = filled(QueueOrder.FCFS, {"a": 0})
    queue.put_back(queue.pop())
    queue.remove("a")
    assert len(queue) == 0


def test_removing_an_unknown_request_raises() -> None:
    with pytest.raises(KeyError):
        filled(QueueOrder.FCFS, {}).remove("ghost")


def test_a_request_cannot_wait_twice() -> None:
    queue = filled(QueueOrder.FCFS, {"a": 0})
    with pytest.raises(ValueError, match="'a' waits already"):
        queue.add("a", 1)
    with pytest.raises(ValueError, match="'a' waits already"):
        queue.put_back("a")


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        WaitingQueue(lambda item: 0).add("a", 0)


def test_a_request_that_keeps_evading_its_turn_is_served_at_the_end_of_the_round() -> None:
    cached = {"mover": 0} | {f"hit{i}": 95 for i in range(200)}
    queue = filled(QueueOrder.GROUPS, cached, num_groups=2)
    picked = []
    for _ in range(3):
        cached["mover"] = 95
        queue.refresh()
        if queue.peek() == "mover":
            cached["mover"] = 0
            queue.refresh()
        picked.append(queue.pop())
    assert picked == ["hit0", "hit1", "mover"]


def test_only_longest_prefix_first_has_no_bound() -> None:
    assert WaitingQueue(lambda item: 0, QueueOrder.LPM).max_picks(0) is None
    assert WaitingQueue(lambda item: 0, QueueOrder.FCFS).max_picks(3) == 4
    assert WaitingQueue(lambda item: 0, QueueOrder.GROUPS, 10).max_picks(0) == 2 * 56


def test_the_order_is_explained_without_serving_anybody() -> None:
    cached = {"cold1": 0, "hot1": 95, "cold2": 5, "hot2": 95, "warm": 60}
    queue = filled(QueueOrder.GROUPS, cached, num_groups=2)
    told = ["hot1", "hot2", "cold1", "warm", "cold2"]
    assert queue.in_order() == queue.in_order() == told
    assert drain(queue) == told


def test_what_was_put_back_is_reported_first() -> None:
    queue = filled(QueueOrder.LPM, {"a": 10, "b": 50, "c": 30})
    queue.put_back(queue.pop())
    assert queue.in_order() == ["b", "c", "a"]


def test_an_empty_queue_has_nobody() -> None:
    assert filled(QueueOrder.GROUPS, {}).in_order() == []


def test_taking_the_next_one_is_the_same_as_popping_it() -> None:
    cached = {f"{group}.{i}": group * 10 for i in range(20) for group in range(10)}
    taken = filled(QueueOrder.GROUPS, cached)
    popped = filled(QueueOrder.GROUPS, cached)
    for item in taken.in_order()[:80]:
        taken.take(item)
        assert popped.pop() == item
    assert taken.in_order() == popped.in_order()


def test_one_taken_out_of_turn_is_charged_to_its_group() -> None:
    cached = {f"hit{i}": 95 for i in range(9)} | {f"miss{i}": 0 for i in range(9)}
    queue = filled(QueueOrder.GROUPS, cached, num_groups=2)
    queue.take("hit1")
    # Group 1 has a share of 2 in a round of 3: one was taken.
    assert queue.in_order()[:3] == ["hit0", "miss0", "hit2"]


def test_one_put_back_can_be_taken() -> None:
    queue = filled(QueueOrder.GROUPS, {"a": 0, "b": 0, "c": 0})
    first, second = queue.pop(), queue.pop()
    queue.put_back(second)
    queue.put_back(first)
    queue.take(second)
    assert list(queue) == [first, "c"]


def test_taking_an_unknown_request_raises() -> None:
    with pytest.raises(KeyError):
        filled(QueueOrder.GROUPS, {"a": 0}).take("ghost")
