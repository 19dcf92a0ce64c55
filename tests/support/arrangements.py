"""Arrangements of an engine's waiting list, as recorded inside the engine, compared with core's own queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from preble.core.replica.waiting_queue import QueueOrder, WaitingQueue


def assert_cores_order(records: Sequence[dict[str, Any]]) -> None:
    """What the engine itself finds in its cache is given to a queue of our own, arrangement by arrangement.

    A record: `waiting`, the list before, as (id, tokens, tokens that the engine finds cached); `in_front`, the ids that
    have to stay in front; `arranged`, the ids after.
    """
    cached: dict[str, int] = {}
    queue = WaitingQueue(cached.__getitem__, QueueOrder.GROUPS)
    reordered = 0
    for record in records:
        waiting = {name: num_tokens for name, num_tokens, _ in record["waiting"] if name not in record["in_front"]}
        cached.update({name: found for name, _, found in record["waiting"]})
        for name in [name for name in queue.in_order() if name not in waiting]:
            queue.take(name)
        for name, num_tokens in waiting.items():
            if name not in queue:
                queue.add(name, num_tokens)
        queue.refresh()
        assert record["arranged"] == [*record["in_front"], *queue.in_order()]
        reordered += [name for name, _, _ in record["waiting"]] != record["arranged"]
    assert reordered > 20, "the scenario is to have something to order"
