"""BlockPool: users of blocks, and the order of their reuse."""

from __future__ import annotations

import pytest

from preble.core.block_pool import BlockPool

FULL = ("content",) * 4
"""Every block of a pool of four or fewer has content."""


def test_a_new_pool_is_free() -> None:
    pool = BlockPool(3)
    assert (pool.num_free, pool.num_used) == (3, 0)


def test_the_end_of_a_released_run_is_taken_before_its_head() -> None:
    pool = BlockPool(3)
    run = pool.take(3)
    pool.release(run, FULL)
    assert pool.take(3) == run[::-1]


def test_a_run_released_earlier_is_taken_earlier() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2), pool.take(2)
    pool.release(second, FULL)
    pool.release(first, FULL)
    assert pool.take(4) == [*second[::-1], *first[::-1]]


def test_a_block_without_content_is_taken_first() -> None:
    pool = BlockPool(4)
    run = pool.take(3)
    pool.release(run[:2], FULL)
    pool.release(run[2:], [None] * 4)
    assert pool.take(4) == [run[2], 3, run[1], run[0]]


def test_a_free_block_without_content_cannot_be_retained() -> None:
    pool = BlockPool(1)
    pool.release(pool.take(1), [None])
    with pytest.raises(KeyError):
        pool.retain([0])


def test_a_block_with_two_users_is_free_after_both_released_it() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.retain([block])
    pool.release([block], FULL)
    assert pool.is_used(block)
    pool.release([block], FULL)
    assert not pool.is_used(block)


def test_a_retained_free_block_cannot_be_taken() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.release([block], FULL)
    pool.retain([block])
    assert pool.take(1) != [block]
    assert pool.num_free == 0


def test_count_free_counts_only_free_blocks() -> None:
    pool = BlockPool(3)
    (used,) = pool.take(1)
    assert pool.count_free([0, 1, 2]) == 2
    assert pool.count_free([used]) == 0


def test_taking_from_an_empty_pool_raises() -> None:
    pool = BlockPool(1)
    pool.take(1)
    with pytest.raises(IndexError, match="1 blocks asked for, 0 are free"):
        pool.take(1)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(0)
