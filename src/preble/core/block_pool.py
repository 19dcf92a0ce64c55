"""The KV blocks of one replica: which are in use, how often, and which is reused next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """A fixed number of blocks, ids 0 ... num_blocks - 1, each either in use (one or more users) or free.

    Free blocks keep their content until they are taken again; they are taken in the order in which they were freed.
    It knows nothing of what a block holds.
    """

    __slots__ = ("_free", "_num_users", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._num_users = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def is_used(self, block: int) -> bool:
        return self._num_users[block] > 0

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free. O(blocks)."""
        return sum(not self._num_users[block] for block in blocks)

    def take(self) -> int:
        """The free block that was freed longest ago, now with one user. O(1).

        Raises: IndexError: no block is free; ask `num_free` first.
        """
        if not self._free:
            raise IndexError("no free block")
        block, _ = self._free.popitem(last=False)
        self._num_users[block] = 1
        return block

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one user to each block; a free one is in use again with its content. O(blocks)."""
        for block in blocks:
            if not self._num_users[block]:
                del self._free[block]
            self._num_users[block] += 1

    def release(self, blocks: Sequence[int], is_worthless: Callable[[int], bool]) -> None:
        """Take one user from each block, the last one first, so that the end of a prompt is reused before its head.

        Blocks without another user become free: `is_worthless` ones to be taken next, the others last. O(blocks).
        """
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if not self._num_users[block]:
                self._free[block] = None
                if is_worthless(block):
                    self._free.move_to_end(block, last=False)

    def free_blocks(self) -> Iterable[int]:
        """The free blocks, the next one to be taken first."""
        return iter(self._free)

    def check(self, expected_users: Iterable[int]) -> None:
        """Assert that each block is used as often as in `expected_users` (ids, repeated), or free. Tests only."""
        counts = [0] * self.num_blocks
        for block in expected_users:
            counts[block] += 1
        assert counts == self._num_users, "users of blocks do not match the sequences that hold them"
        assert set(self._free) == {block for block, users in enumerate(counts) if not users}, "free list is wrong"
