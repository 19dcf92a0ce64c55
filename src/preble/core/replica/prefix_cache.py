"""One replica's prefix cache: full KV blocks, found by their own tokens and all tokens before them.

A block's hash covers its own tokens and, through its parent's hash, every token before it. So a prompt's cached prefix
is the longest run of its hashes that are known. A long prefix can be evicted block by block, and no tree is needed
(docs/decisions/0003). Two facts hold at all times:

- A hash has one block. A sequence that computes the block a second time gets the first one instead.
- A cached block's parent is cached too. A user of a block uses its parents, and a run's blocks are released from its
end
  and reused in the order of their release.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

from preble.core.replica.block_pool import BlockPool
from preble.core.types import TOKEN_BYTES, BlocksEvicted, BlocksStored, CacheCleared, KvEvent, PackedTokens, ReplicaId

_HASH_BYTES = 8
_RUN_BLOCKS = 32
"""Blocks per entry of the memo of hashes, which prompts with the same prefix share."""


def hash_blocks(tokens: bytes, block_size: int, parent: int | None = None, namespace: str = "") -> list[int]:
    """Return hashes of the full blocks of a packed run that follows block `parent`, unsigned 64 bit. O(tokens).

    A prompt of another `namespace` has other hashes from its first block on. An unfilled last block has no hash.

    >>> from preble.core.types import pack_tokens
    >>> first, second = hash_blocks(pack_tokens(range(9)), block_size=4)
    >>> hash_blocks(pack_tokens([4, 5, 6, 7]), block_size=4, parent=first) == [second]
    True
    """
    if parent is not None:
        digest = parent.to_bytes(_HASH_BYTES, sys.byteorder)
    else:
        digest = blake2b(namespace.encode()).digest()[:_HASH_BYTES]
    step = block_size * TOKEN_BYTES
    num_bytes = len(tokens) // step * step
    digests = []
    for start in range(0, num_bytes, step * _RUN_BLOCKS):
        run = tokens[start : min(start + step * _RUN_BLOCKS, num_bytes)]
        # Whole runs are likely to be shared by many prompts, the rest of a prompt is not.
        hash_run = _hash_run if len(run) == step * _RUN_BLOCKS else _hash_run.__wrapped__
        digests.append(hash_run(digest, run, step))
        digest = digests[-1][-_HASH_BYTES:]
    return array("Q", b"".join(digests)).tolist()


@lru_cache(maxsize=4096)
def _hash_run(digest: bytes, run: bytes, step: int) -> bytes:
    """Return the digests, joined, of blocks of `step` bytes that follow a block of this digest."""
    digests = []
    for start in range(0, len(run), step):
        # Cutting a whole digest is twice as fast as asking for a short one: passing the argument costs that much.
        digest = blake2b(digest + run[start : start + step]).digest()[:_HASH_BYTES]
        digests.append(digest)
    return b"".join(digests)


class PrefixCache:
    """Blocks by hash, over a `BlockPool`. A new block takes the place of the least recently used one.

    Blocks in use stay. Every change is reported once, in order, by `take_events`.
    """

    __slots__ = ("_block_of", "_events", "_hash_of", "_replica_id", "block_size", "pool")

    def __init__(self, replica_id: ReplicaId, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"a block needs at least 1 token, got block_size {block_size}")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._replica_id = replica_id
        self._block_of: dict[int, int] = {}
        self._hash_of: list[int | None] = [None] * num_blocks
        self._events: list[KvEvent] = []

    def __len__(self) -> int:
        """Return the number of cached blocks, in use or not."""
        return len(self._block_of)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._block_of

    def __iter__(self) -> Iterator[int]:
        """Return hashes of the cached blocks."""
        return iter(self._block_of)

    def match(self, hashes: Sequence[int], hint: int = 0) -> int:
        """Return how many leading blocks of `hashes` are cached. Changes nothing.

        `hint`: an earlier answer for the same hashes; O(1) if it still holds, O(log blocks) otherwise.
        """
        cached = self._block_of
        is_known = not hint or (hint <= len(hashes) and hashes[hint - 1] in cached)
        if is_known and (hint == len(hashes) or hashes[hint] not in cached):
            return hint
        # Parents of cached blocks are cached, so all known blocks come before all others.
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in cached)

    def can_hold(self, num_blocks: int, prefix: Sequence[int]) -> bool:
        """Return whether `lock(prefix)` and then `allocate(num_blocks)` would succeed now. O(free blocks in the
        prefix).
        """
        if num_blocks + len(prefix) <= self.pool.num_free:
            return True
        free_in_prefix = self.pool.count_free(map(self._block_of.__getitem__, reversed(prefix)))
        return num_blocks <= self.pool.num_free - free_in_prefix

    def lock(self, prefix: Sequence[int]) -> list[int]:
        """Lock a run of the blocks of cached hashes. Raises: KeyError: one is not cached."""
        blocks = list(map(self._block_of.__getitem__, prefix))
        self.pool.retain(blocks)
        return blocks

    def allocate(self, num_blocks: int) -> list[int]:
        """New blocks, to continue a run or to begin one; their old content is forgotten.

        Raises: IndexError: too few are free.
        """
        blocks = self.pool.take(num_blocks)
        evicted = [block_hash for block in blocks if (block_hash := self._hash_of[block]) is not None]
        if evicted:
            for block_hash in evicted:
                self._hash_of[self._block_of.pop(block_hash)] = None
            self._events.append(BlocksEvicted(self._replica_id, tuple(evicted)))
        return blocks

    def insert(
        self, blocks: list[int], hashes: Sequence[int], start: int, stop: int, tokens: PackedTokens, namespace: str = ""
    ) -> None:
        """Cache `blocks[start:stop]`, whose tokens are computed, under `hashes[start:stop]`.

        They must be new, and their parents, `hashes[:start]`, cached. `tokens`: packed ids of exactly these blocks. If
        another block has the hash already, `blocks` is changed in place to use that one, and its own block is released.
        """
        first_new = start + self.match(hashes[start:stop])
        if first_new > start:
            self.pool.replace(blocks, start, list(map(self._block_of.__getitem__, hashes[start:first_new])))
        if first_new == stop:
            return
        new = hashes[first_new:stop]
        self._remember(blocks[first_new:stop], new)
        self._events.append(
            BlocksStored(
                self._replica_id,
                tuple(new),
                hashes[first_new - 1] if first_new else None,
                PackedTokens(tokens[(first_new - start) * self.block_size * TOKEN_BYTES :]),
                self.block_size,
                namespace,
            )
        )

    def release(self, blocks: Sequence[int]) -> None:
        """Stop using a run. Its cached blocks stay in the cache."""
        self.pool.release(blocks, self._hash_of)

    def clear(self) -> bool:
        """Forget everything, if nothing is in use; otherwise change nothing and return False."""
        if self.pool.num_used:
            return False
        for block in self._block_of.values():
            self._hash_of[block] = None
        self._block_of.clear()
        self._events.append(CacheCleared(self._replica_id))
        return True

    def take_events(self) -> list[KvEvent]:
        """Return what changed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """Assert this class's invariants. O(blocks); tests only."""
        for block_hash, block in self._block_of.items():
            assert self._hash_of[block] == block_hash, "the two directions of the block table differ"
        known = sum(block_hash is not None for block_hash in self._hash_of)
        assert known == len(self._block_of), "a block has a hash that does not find it"

    def _remember(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        self._block_of.update(zip(hashes, blocks, strict=True))
        for block, block_hash in zip(blocks, hashes, strict=True):
            self._hash_of[block] = block_hash
