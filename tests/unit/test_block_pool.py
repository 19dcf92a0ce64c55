"""BlockPool: users of blocks, and the order of their reuse."""

from __future__ import annotations

import pytest

from preble.core.block_pool import BlockPool


def never(block: int) -> bool:
    return False


def test_a_new_pool_is_free() -> None:
    pool = BlockPool(3)
    assert (pool.num_free, pool.num_used) == (3, 0)


def test_the_end_of_a_released_run_is_taken_before_its_head() -> None:
    pool = BlockPool(3)
    run = [pool.take() for _ in range(3)]
    pool.release(run, never)
    assert [pool.take() for _ in range(3)] == run[::-1]


def test_a_run_released_earlier_is_taken_earlier() -> None:
    pool = BlockPool(4)
    first, second = [pool.take(), pool.take()], [pool.take(), pool.take()]
    pool.release(second, never)
    pool.release(first, never)
    assert [pool.take() for _ in range(4)] == [*second[::-1], *first[::-1]]


def test_a_worthless_block_is_taken_first() -> None:
    pool = BlockPool(3)
    run = [pool.take() for _ in range(3)]
    pool.release(run[:2], never)
    pool.release(run[2:], lambda block: True)
    assert pool.take() == run[2]


def test_a_block_with_two_users_is_free_after_both_released_it() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.retain([block])
    pool.release([block], never)
    assert pool.is_used(block)
    pool.release([block], never)
    assert not pool.is_used(block)


def test_a_retained_free_block_cannot_be_taken() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.release([block], never)
    pool.retain([block])
    assert pool.take() != block
    assert pool.num_free == 0


def test_count_free_counts_only_free_blocks() -> None:
    pool = BlockPool(3)
    used = pool.take()
    assert pool.count_free([0, 1, 2]) == 2
    assert pool.count_free([used]) == 0


def test_taking_from_an_empty_pool_raises() -> None:
    pool = BlockPool(1)
    pool.take()
    with pytest.raises(IndexError, match="no free block"):
        pool.take()


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(0)
