"""PrefixCache: blocks found by their tokens, evicted in parts, reported as values."""

from __future__ import annotations

import pytest

from preble.core.replica.prefix_cache import PrefixCache, hash_blocks
from preble.core.types import BlocksEvicted, BlocksStored, CacheCleared, ReplicaId, pack_tokens

R = ReplicaId("r")
BLOCK = 4


def store(cache: PrefixCache, token_ids: range, namespace: str = "") -> tuple[list[int], list[int]]:
    """Compute a prompt of whole blocks from nothing; its blocks (still in use) and hashes."""
    tokens = pack_tokens(token_ids)
    hashes = hash_blocks(tokens, cache.block_size, namespace=namespace)
    blocks = cache.allocate(len(hashes))
    cache.insert(blocks, hashes, 0, len(hashes), tokens, namespace)
    return blocks, hashes


def test_a_tail_that_fills_no_block_has_no_hash() -> None:
    assert len(hash_blocks(pack_tokens(range(11)), BLOCK)) == 2
    assert hash_blocks(pack_tokens(range(3)), BLOCK) == []


def test_hashes_are_unsigned_64_bit_integers() -> None:
    hashes = hash_blocks(pack_tokens(range(400)), BLOCK)
    assert all(0 <= block_hash < 2**64 for block_hash in hashes)
    assert max(hashes) >= 2**63


def test_the_same_block_after_another_parent_has_another_hash() -> None:
    one = hash_blocks(pack_tokens([1, 1, 1, 1, 5, 6, 7, 8]), BLOCK)
    two = hash_blocks(pack_tokens([2, 2, 2, 2, 5, 6, 7, 8]), BLOCK)
    assert one[1] != two[1]


def test_a_namespace_changes_every_hash() -> None:
    tokens = pack_tokens(range(8))
    assert not set(hash_blocks(tokens, BLOCK)) & set(hash_blocks(tokens, BLOCK, namespace="adapter"))


def test_a_stored_prefix_is_matched_to_its_length() -> None:
    cache = PrefixCache(R, 8, BLOCK)
    _, hashes = store(cache, range(8))
    other = hash_blocks(pack_tokens([*range(8), 99, 99, 99, 99]), BLOCK)
    assert cache.match(hashes) == 2
    assert cache.match(other) == 2
    assert cache.match(hash_blocks(pack_tokens([9, *range(7)]), BLOCK)) == 0


@pytest.mark.parametrize("hint", [0, 1, 2, 3, 50])
def test_any_hint_gives_the_same_match(hint: int) -> None:
    cache = PrefixCache(R, 8, BLOCK)
    store(cache, range(8))
    longer = hash_blocks(pack_tokens(range(16)), BLOCK)
    assert cache.match(longer, hint) == 2


def test_storing_is_reported_once_with_parent_and_tokens() -> None:
    cache = PrefixCache(R, 8, BLOCK)
    tokens = pack_tokens(range(12))
    hashes = hash_blocks(tokens, BLOCK)
    blocks = cache.allocate(3)
    cache.insert(blocks, hashes, 0, 1, pack_tokens(range(4)))
    cache.insert(blocks, hashes, 1, 3, pack_tokens(range(4, 12)))
    assert cache.take_events() == [
        BlocksStored(R, (hashes[0],), None, pack_tokens(range(4)), BLOCK),
        BlocksStored(R, tuple(hashes[1:]), hashes[0], pack_tokens(range(4, 12)), BLOCK),
    ]
    assert cache.take_events() == []


def test_a_block_computed_twice_is_kept_once() -> None:
    cache = PrefixCache(R, 8, BLOCK)
    first, _ = store(cache, range(8))
    cache.take_events()
    second, _ = store(cache, range(8))
    assert second == first
    assert cache.pool.num_used == 2
    assert cache.take_events() == []


def test_only_the_new_end_of_a_run_is_reported() -> None:
    cache = PrefixCache(R, 8, BLOCK)
    store(cache, range(4))
    cache.take_events()
    _, hashes = store(cache, range(12))
    assert cache.take_events() == [BlocksStored(R, tuple(hashes[1:]), hashes[0], pack_tokens(range(4, 12)), BLOCK)]


def test_eviction_takes_only_what_is_needed_from_the_end_of_the_oldest_prompt() -> None:
    cache = PrefixCache(R, 4, BLOCK)
    old, old_hashes = store(cache, range(8))
    new, new_hashes = store(cache, range(100, 108))
    cache.release(old)
    cache.release(new)
    cache.take_events()
    cache.allocate(1)
    assert cache.take_events() == [BlocksEvicted(R, (old_hashes[1],))]
    assert (cache.match(old_hashes), cache.match(new_hashes)) == (1, 2)


def test_a_block_in_use_is_never_evicted() -> None:
    cache = PrefixCache(R, 3, BLOCK)
    _, used = store(cache, range(4))
    free_blocks, free = store(cache, range(50, 54))
    cache.release(free_blocks)
    cache.allocate(2)
    assert (cache.match(used), cache.match(free)) == (1, 0)
    with pytest.raises(IndexError, match="1 blocks asked for, 0 are free"):
        cache.allocate(1)


def test_locking_a_prefix_keeps_it_from_eviction_and_renews_it() -> None:
    cache = PrefixCache(R, 3, BLOCK)
    blocks, hashes = store(cache, range(8))
    cache.release(blocks)
    assert not cache.can_hold(2, hashes)
    assert cache.can_hold(1, hashes)
    assert cache.lock(hashes) == blocks
    cache.allocate(1)
    assert cache.match(hashes) == 2


def test_clear_is_refused_while_a_block_is_in_use() -> None:
    cache = PrefixCache(R, 3, BLOCK)
    _, hashes = store(cache, range(4))
    cache.take_events()
    assert not cache.clear()
    assert cache.match(hashes) == 1
    assert cache.take_events() == []


def test_clear_forgets_everything_and_says_so() -> None:
    cache = PrefixCache(R, 3, BLOCK)
    blocks, hashes = store(cache, range(8))
    cache.release(blocks)
    cache.take_events()
    assert cache.clear()
    assert cache.match(hashes) == 0
    assert cache.take_events() == [CacheCleared(R)]
    cache.allocate(3)
    assert cache.take_events() == []


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size 0"):
        PrefixCache(R, 3, 0)


def test_a_long_prompt_has_the_hashes_that_it_has_block_by_block() -> None:
    """Longer than what is hashed, and remembered, in one go."""
    prompt = pack_tokens(range(300))
    one_by_one: list[int] = []
    for start in range(0, 300, 4):
        parent = one_by_one[-1] if one_by_one else None
        one_by_one += hash_blocks(prompt[4 * start : 4 * (start + 4)], block_size=4, parent=parent)
    assert hash_blocks(prompt, block_size=4) == one_by_one == hash_blocks(prompt, block_size=4)
    assert set(hash_blocks(prompt, block_size=4, namespace="other")).isdisjoint(one_by_one)
