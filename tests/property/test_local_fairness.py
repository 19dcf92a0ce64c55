"""How long a miss waits in a replica under a stream of hits that never ends: in admissions, and in batches."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preble.core.replica.scheduler import LocalScheduler
from preble.core.replica.waiting_queue import QueueOrder, WaitingQueue
from preble.core.types import PackedTokens, ReplicaId, Request, RequestId, pack_tokens

BLOCK, BUDGET = 16, 64
PREFIX = range(100, 100 + 20 * BLOCK)
MISS = Request(RequestId("miss"), pack_tokens(range(500, 500 + 21 * BLOCK)))
GIVE_UP = 1000
"""Batches; many times what a miss waits in any order that has a bound."""


def hit(number: int) -> Request:
    """The prefix and one block of its own: as long as the miss."""
    own = range(10_000 + number * BLOCK, 10_000 + (number + 1) * BLOCK)
    return Request(RequestId(f"hit{number}"), pack_tokens([*PREFIX, *own]))


def answer(num_tokens: int) -> PackedTokens:
    return pack_tokens(range(num_tokens))


def replica(order: QueueOrder, max_running: int) -> LocalScheduler:
    """Nothing runs, and the prefix is in its cache."""
    scheduler = LocalScheduler(
        replica_id=ReplicaId("r"),
        num_blocks=400,
        block_size=BLOCK,
        max_batch_tokens=BUDGET,
        max_running=max_running,
        order=order,
    )
    scheduler.add(Request(RequestId("first"), pack_tokens(PREFIX)), answer(1), 0.0)
    while (batch := scheduler.next_batch(0.0)) is not None:
        scheduler.complete(batch, 0.0)
    return scheduler


def until_the_miss(scheduler: LocalScheduler, num_older: int, output_tokens: list[int]) -> tuple[int, int] | None:
    """(requests admitted until the miss was, itself included; batches until then); None where it never was.

    Hits arrive so that 20 wait whenever a batch is formed. `output_tokens`: of the hits, in turn.
    """
    numbers = count()

    def add_hits(until: int) -> None:
        while scheduler.num_waiting < until:
            number = next(numbers)
            scheduler.add(hit(number), answer(output_tokens[number % len(output_tokens)]), 0.0)

    add_hits(num_older)
    scheduler.add(MISS, answer(1), 0.0)
    admitted: set[RequestId] = set()
    for batches in range(1, GIVE_UP):
        add_hits(20)
        batch = scheduler.next_batch(0.0)
        assert batch is not None and not batch.preempted
        admitted |= {chunk.request_id for chunk in batch.prefills}
        if MISS.request_id in admitted:
            return len(admitted), batches
        scheduler.complete(batch, 0.0)
    return None


@given(
    num_older=st.integers(0, 15),
    max_running=st.integers(1, 8),
    output_tokens=st.lists(st.integers(1, 12), min_size=1, max_size=6),
)
def test_a_miss_is_admitted_within_its_bound(num_older: int, max_running: int, output_tokens: list[int]) -> None:
    waited = until_the_miss(replica(QueueOrder.GROUPS, max_running), num_older, output_tokens)
    bound = WaitingQueue(lambda item: 0).max_picks(num_older)
    assert waited is not None and bound is not None
    admitted, batches = waited
    assert admitted <= bound
    # A hit is one chunk; then it decodes in every batch, and its place is free when it has its output.
    assert batches <= bound * max(output_tokens)


def test_a_miss_waits_for_ten_hits_where_no_other_misses_wait() -> None:
    waited = until_the_miss(replica(QueueOrder.GROUPS, max_running=1), 15, [1])
    assert waited is not None
    assert waited[0] == 11


@pytest.mark.parametrize("max_running", [1, 8])
def test_longest_prefix_first_never_admits_the_miss(max_running: int) -> None:
    assert until_the_miss(replica(QueueOrder.LPM, max_running), 0, [1]) is None
