"""What the index keeps of one tree node on one replica, and how much memory all of that takes."""

from __future__ import annotations

from typing import Final

from preble.core.prefixes.radix_tree import Node

ENTRY_BYTES: Final = 194
RUN_BYTES: Final = 150
NAME_BYTES: Final = 4
COPIED_BYTES: Final = 75
"""Memory of an entry, of the names of its blocks where it has any, of each of these names, and of each block that a
replica has more than once, on CPython 3.11."""


class CacheEntry:
    """One node on one replica.

    `held`: leading tokens of the node that the replica caches. `ref_count`: its requests in flight that use the node;
    while there are any, the whole node is cached or about to be. `recent_uses`: its requests of the window that use the
    node. `last_used_s`: when the last request that uses it was placed there. `names`: of consecutive blocks of
    `block_size` tokens that end in the node, the last one at token `names_end` of the prompt; see `BlockNames`.
    """

    __slots__ = (
        "block_size",
        "held",
        "last_used_s",
        "names",
        "names_end",
        "newer",
        "node",
        "older",
        "recent_uses",
        "ref_count",
    )

    def __init__(self, node: Node | None, last_used_s: float) -> None:
        self.node = node
        self.held = 0
        self.ref_count = 0
        self.recent_uses = 0
        self.last_used_s = last_used_s
        self.names = b""
        self.names_end = 0
        self.block_size = 0
        self.older: CacheEntry = self
        self.newer: CacheEntry = self

    def tokens_in(self, node: Node) -> int:
        """Return leading tokens of `node` (this entry's own) that are cached or about to be."""
        return node.num_tokens if self.ref_count else self.held


class IndexSize:
    """Entries and block names of all replicas, for the index's byte budget.

    `runs`: entries that have names. `copied`: blocks that a replica has more than once. `crowded`: the replicas on
    which more was placed than fits, as a mask.
    """

    __slots__ = ("copied", "crowded", "entries", "names", "runs")

    def __init__(self) -> None:
        self.crowded = 0
        self.entries = 0
        self.names = 0
        self.runs = 0
        self.copied = 0
