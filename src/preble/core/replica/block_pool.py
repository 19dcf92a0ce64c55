"""The KV blocks of one replica: which are in use, and which one is reused next.

A *run* is the list of blocks that one sequence uses, in its order. Runs share beginnings: two runs that share a block
are the same up to it. So blocks in use form trees. A block's users are the runs that end with it and the blocks in use
that follow it. This makes taking or releasing a run as cheap as the number of blocks whose state changes: if many runs
share a prefix, only the end of a run.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile


class BlockPool:
    """A fixed number of blocks, ids 0 ... num_blocks - 1, each either in use (by one or more users) or free.

    Free blocks keep their content until they are taken again, in the order in which they were freed; free blocks
    without content are taken first. The pool does not know what a block holds.
    """

    __slots__ = ("_empty", "_kept", "_num_new", "_num_users", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._num_users = [0] * num_blocks
        self._empty: list[int] = []
        """Free blocks that were used before and have no content; the last one is taken next."""
        self._num_new = num_blocks
        """The number of blocks that were never used, the last ones of all; they are taken after the empty ones."""
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

    def count_free(self, backwards: Iterable[int]) -> int:
        """Return the number of free blocks in a run, which is given from its end. O(free blocks)."""
        return sum(1 for _ in takewhile(lambda block: not self._num_users[block], backwards))

    def take(self, num_blocks: int) -> list[int]:
        """Return a run of free blocks, in the order of reuse; it may continue another run. O(num_blocks).

        Raises: IndexError: too few are free.
        """
        if num_blocks > self.num_free:
            raise IndexError(f"{num_blocks} blocks asked for, {self.num_free} are free")
        empty, kept = self._empty, self._kept
        taken: list[int] = []
        while empty and len(taken) < num_blocks:
            taken.append(empty.pop())
        if self._num_new:
            first_new, num_new = self.num_blocks - self._num_new, min(num_blocks - len(taken), self._num_new)
            taken += range(first_new, first_new + num_new)
            self._num_new -= num_new
        if len(taken) < num_blocks:
            taken += [kept.popitem(last=False)[0] for _ in range(num_blocks - len(taken))]
        for block in taken:
            self._num_users[block] = 1
        return taken

    def retain(self, run: Sequence[int]) -> None:
        """Add a user to a run; its free blocks are in use again, with their content. O(free blocks in it).

        Raises: KeyError: one is free and has no content.
        """
        num_users, kept = self._num_users, self._kept
        for block in reversed(run):
            num_users[block] += 1
            if num_users[block] > 1:
                return
            del kept[block]

    def release(self, run: Sequence[int], contents: Sequence[object]) -> None:
        """Remove a user from a run, from the end on, so that the end of a prompt is reused before its head.

        Blocks without another user become free. `contents`: of every block of the pool, None where it has none.
        O(blocks that become free).
        """
        num_users, kept, empty = self._num_users, self._kept, self._empty
        for block in reversed(run):
            num_users[block] -= 1
            if num_users[block]:
                return
            if contents[block] is None:
                empty.append(block)
            else:
                kept[block] = None

    def replace(self, run: list[int], start: int, known: Sequence[int]) -> None:
        """Make `run` use the blocks `known` from index `start` on, and free its own ones there.

        Its own blocks must have no content and be in no other run; `known` must have content. O(run).
        """
        stop = start + len(known)
        own, run[start:stop] = run[start:stop], known
        self.retain(run[:stop])
        for block in own:
            self._num_users[block] = 0
        self._empty += own
        if start:
            self._num_users[run[start - 1]] -= 1

    def check(self, runs: Iterable[Sequence[int]]) -> None:
        """Assert that the blocks of these runs are in use, and no others. O(everything); tests only."""
        runs = [run for run in runs if run]
        follows = {pair for run in runs for pair in pairwise(run)}
        assert len({after for _, after in follows}) == len(follows), "two runs that share a block differ before it"
        users = Counter([run[-1] for run in runs]) + Counter([before for before, _ in follows])
        assert [users[block] for block in range(self.num_blocks)] == self._num_users, "users of blocks are wrong"
        free = [*self._kept, *self._empty, *range(self.num_blocks - self._num_new, self.num_blocks)]
        assert sorted(free) == [block for block in range(self.num_blocks) if not users[block]], "free lists are wrong"
