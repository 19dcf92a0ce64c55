"""The KV blocks of one replica: which are in use, how often, and which is reused next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """A fixed number of blocks, ids 0 ... num_blocks - 1, each either in use (one or more users) or free.

    Free blocks with content keep it until they are taken again, in the order in which they were freed; those without
    are taken before them. It knows nothing of what a block holds.
    """

    __slots__ = ("_empty", "_kept", "_num_new", "_num_users", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._num_users = [0] * num_blocks
        self._empty: list[int] = []
        """Free blocks that were used and have no content; the last one is taken next."""
        self._num_new = num_blocks
        """Blocks that were never used: as many as that at the end of all; taken after the empty ones."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Free blocks with content, the one freed longest ago first."""

    @property
    def num_free(self) -> int:
        return len(self._kept) + len(self._empty) + self._num_new

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def is_used(self, block: int) -> bool:
        return self._num_users[block] > 0

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free. O(blocks)."""
        return sum(not self._num_users[block] for block in blocks)

    def take(self, num_blocks: int) -> list[int]:
        """Free blocks, in the order in which they are to be reused, now with one user each. O(num_blocks).

        Raises: IndexError: too few are free.
        """
        if num_blocks > self.num_free:
            raise IndexError(f"{num_blocks} blocks asked for, {self.num_free} are free")
        empty, kept = self._empty, self._kept
        taken = [empty.pop() for _ in range(min(num_blocks, len(empty)))]
        first_new, num_new = self.num_blocks - self._num_new, min(num_blocks - len(taken), self._num_new)
        taken += range(first_new, first_new + num_new)
        self._num_new -= num_new
        taken += [kept.popitem(last=False)[0] for _ in range(num_blocks - len(taken))]
        for block in taken:
            self._num_users[block] = 1
        return taken

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one user to each block; a free one is in use again with its content. O(blocks).

        Raises: KeyError: a block is free and has no content.
        """
        num_users, kept = self._num_users, self._kept
        for block in blocks:
            users = num_users[block]
            if not users:
                del kept[block]
            num_users[block] = users + 1

    def release(self, blocks: Sequence[int], contents: Sequence[object]) -> None:
        """Take one user from each block, the last one first, so that the end of a prompt is reused before its head.

        Blocks without another user become free. `contents`: of every block of the pool, None where it has none.
        O(blocks).
        """
        num_users, kept, empty = self._num_users, self._kept, self._empty
        for block in reversed(blocks):
            users = num_users[block] = num_users[block] - 1
            if users:
                continue
            if contents[block] is None:
                empty.append(block)
            else:
                kept[block] = None

    def check(self, expected_users: Iterable[int]) -> None:
        """Assert that each block is used as often as in `expected_users` (ids, repeated), or free. Tests only."""
        counts = [0] * self.num_blocks
        for block in expected_users:
            counts[block] += 1
        assert counts == self._num_users, "users of blocks do not match the sequences that hold them"
        free = [*self._kept, *self._empty, *range(self.num_blocks - self._num_new, self.num_blocks)]
        assert sorted(free) == [block for block, users in enumerate(counts) if not users], "free lists are wrong"
