"""BlockPool: users of blocks, and the order of their reuse."""

from __future__ import annotations

import pytest

from preble.core.replica.block_pool import BlockPool

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


def test_the_free_blocks_of_a_run_are_counted_from_its_end() -> None:
    pool = BlockPool(3)
    run = pool.take(3)
    pool.retain(run[:1])
    pool.release(run, FULL)
    assert pool.count_free(reversed(run)) == 2
    assert pool.count_free(run[:1]) == 0


def test_a_beginning_that_two_runs_share_is_in_use_until_both_are_released() -> None:
    pool = BlockPool(4)
    first = pool.take(3)
    pool.retain(first[:2])
    second = first[:2] + pool.take(1)
    pool.check([first, second])
    pool.release(first, FULL)
    pool.check([second])
    pool.release(second, FULL)
    pool.check([])
    assert pool.take(4) == [2, 3, 1, 0]


def test_a_run_that_is_used_once_more_costs_its_free_blocks_only() -> None:
    """Worked by hand: of a run of three its head is in use, so that two blocks are taken out of the free ones."""
    pool = BlockPool(3)
    run = pool.take(3)
    pool.retain(run[:1])
    pool.release(run, FULL)
    pool.retain(run)
    pool.check([run, run[:1]])
    pool.retain(run)
    pool.release(run, FULL)
    assert (pool.num_free, pool.num_used) == (0, 3)


@pytest.mark.parametrize("known_is_free", [True, False])
@pytest.mark.parametrize("start", [0, 1])
def test_blocks_computed_twice_are_replaced_by_those_known(start: int, known_is_free: bool) -> None:
    """The second run has its own block at `start`, whose tokens are those of the first run's block there."""
    pool = BlockPool(5)
    first = pool.take(2)
    pool.retain(first[:start])
    second = first[:start] + pool.take(3 - start)
    if known_is_free:
        pool.release(first, FULL + FULL)
    own = second[start]
    pool.replace(second, start, [first[start]])
    assert second[start] == first[start]
    pool.check([second] if known_is_free else [first, second])
    assert pool.take(1) == [own]


def test_taking_from_an_empty_pool_raises() -> None:
    pool = BlockPool(1)
    pool.take(1)
    with pytest.raises(IndexError, match="1 blocks asked for, 0 are free"):
        pool.take(1)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(0)
