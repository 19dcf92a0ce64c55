"""The cache of one replica as the scheduler knows it: an entry for each tree node, in the order of eviction.

The order is least recently used first, and a node always comes before its ancestors (a request that uses a prefix uses
all of it). So a walk from the old end meets leaves first, as the engines' own LRU does. An entry that only counts
requests of the window is not in the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from preble.core.prefixes.block_names import BlockNames
from preble.core.prefixes.cache_entry import CacheEntry, IndexSize
from preble.core.prefixes.radix_tree import Node
from preble.core.types import BlockHash

UNKNOWN_CAPACITY = 1 << 60
"""Tokens that no cache holds; an integer, since compiled code compares integers much faster than with infinity."""

_CUT_SHIFT = 3


class ReplicaCache:
    """The entries of one replica. `bit`: its bit in the nodes' masks. `used_tokens`: cached or about to be, in all.

    `in_use_tokens`: those of them that requests in flight use, each token once. `capacity`: how many it can cache, or
    `UNKNOWN_CAPACITY`. `is_crowded`: more was placed here than fits, so that what waits will evict something. `version`
    grows with every change.
    Every change of an entry goes through a method here, which keeps the masks of the nodes in step.
    """

    __slots__ = (
        "_cut",
        "_cut_excess",
        "_cut_in_use",
        "_cut_version",
        "_num_cut",
        "_ring",
        "_size",
        "bit",
        "capacity",
        "entries",
        "in_use_tokens",
        "is_crowded",
        "names",
        "used_tokens",
        "version",
    )

    def __init__(self, replica: int, size: IndexSize) -> None:
        self.bit = 1 << replica
        self.capacity = UNKNOWN_CAPACITY
        self.used_tokens = 0
        self.is_crowded = False
        self.in_use_tokens = 0
        self.version = 0
        self._size = size
        self.names = BlockNames(size)
        self.entries: dict[Node, CacheEntry] = {}
        self._ring = CacheEntry(None, 0.0)
        self._cut, self._cut_excess, self._cut_version, self._num_cut = self._ring, 0, -1, 0
        self._cut_in_use = False

    def __len__(self) -> int:
        return len(self.entries)

    def oldest_idle(self) -> CacheEntry | None:
        """Return the least recently used entry that is not in use. O(1 + older entries in use)."""
        return next((entry for entry in self.oldest_first() if not entry.ref_count), None)

    def block(self, block_hash: BlockHash) -> tuple[Node, int] | None:
        """Return the node in which a block ends, and the prompt tokens up to its end; None if it is unknown.

        O(1) for the last one named in a node, else O(names).
        """
        found = self.names.find(block_hash, self.entries.values())
        if found is None or found[0].node is None:
            return None
        return found[0].node, found[1]

    def name_blocks(self, names: bytes, node: Node, end: int, block_size: int, *, are_copies: bool = False) -> None:
        """The replica names consecutive blocks, the last of which ends at token `end`, in `node`.

        `are_copies`: of those that have their names already, it has one copy more.
        """
        entry = self.entries.get(node)
        if entry is not None:
            self.names.add(entry, names, end, block_size, are_copies=are_copies)

    def forget_names(self, block_hashes: Sequence[BlockHash]) -> list[tuple[Node, int, int, bytes]]:
        """Forget one copy of these blocks. Return (node, start, block size) of the first one of each node of which it
        was the last copy, and the names that are gone. O(names)."""
        gone = self.names.pop(block_hashes, self.entries.values())
        return [
            (entry.node, entry.names_end, entry.block_size, before[len(entry.names) :])
            for entry, before in gone.items()
            if entry.node is not None
        ]

    def named_ends(self, block_hashes: Sequence[BlockHash]) -> list[tuple[Node, int]]:
        """(node, end) of those of these blocks that are the last ones named in a node. O(blocks)."""
        return [(entry.node, entry.names_end) for entry in self.names.ends(block_hashes) if entry.node is not None]

    def touch(self, leaf: Node, now: float) -> None:
        """What is cached of the path to `leaf` has been used. O(depth)."""
        self.version += 1
        for node in leaf.ancestors():
            entry = self.entries.get(node)
            if entry is not None and _is_linked(entry):
                entry.last_used_s = now
                _link_before(entry, self._ring)

    def forget_blocks(self) -> None:
        """Forget all names. O(entries)."""
        self.names.clear(self.entries.values())

    def tokens_held(self, node: Node) -> int:
        """Return leading tokens of `node` that the replica caches already."""
        entry = self.entries.get(node)
        return 0 if entry is None else entry.held

    def tokens_left(self, node: Node) -> int:
        """Return leading tokens of `node` that a crowded cache will have left when all that was placed is computed.

        It evicts the least recently used first, and what a request uses only when nothing idle is left. Ask for the
        nodes of a prompt from the top, up to the first that is not left whole. O(1) on average: one change moves the
        end of what will be gone by a few entries, so where that is many, it is looked for again only after an eighth
        as many changes.
        """
        entry = self.entries.get(node)
        if entry is None:
            return 0
        if self.version - self._cut_version > self._num_cut >> _CUT_SHIFT:
            self._find_cut()
        tokens = entry.tokens_in(node)
        if entry is self._cut:
            return max(tokens - self._cut_excess, 0)
        in_use = entry.ref_count > 0
        if in_use != self._cut_in_use:
            return tokens if in_use else 0
        return 0 if entry.last_used_s < self._cut.last_used_s else tokens

    def is_in_use(self, node: Node) -> bool:
        """Return whether a request in flight uses the node."""
        entry = self.entries.get(node)
        return entry is not None and entry.ref_count > 0

    def add_use(self, path: list[Node], now: float) -> None:
        """Note a request that uses `path` and was placed here. O(depth)."""
        self.version += 1
        for node in reversed(path):
            entry = self.entries.get(node)
            if entry is None:
                entry = self._add(node, now)
            _link_before(entry, self._ring)
            entry.last_used_s = now
            entry.recent_uses += 1
            node.recent_uses += 1
            entry.ref_count += 1
            if entry.ref_count == 1:
                self._use(node.num_tokens - entry.held)
                self.in_use_tokens += node.num_tokens
                node.full_holders |= self.bit

    def add_hold(self, path: list[Node], now: float) -> None:
        """Note that `path`, which the replica caches whole, is in use without a request. O(depth)."""
        self.version += 1
        for node in reversed(path):
            entry = self.entries[node]
            _link_before(entry, self._ring)
            entry.last_used_s = now
            entry.ref_count += 1
            if entry.ref_count == 1:
                self._use(node.num_tokens - entry.held)
                self.in_use_tokens += node.num_tokens

    def walk_up(self, leaf: Node, ref_count: int, recent_uses: int) -> list[Node]:
        """Take requests off the path to `leaf`: `ref_count` that have ended, `recent_uses` that have left the window.

        Return the nodes that lost their entry. O(depth).
        """
        self.version += 1
        dropped = []
        node = leaf
        while node.parent is not None:
            entry = self.entries[node]
            entry.recent_uses -= recent_uses
            node.recent_uses -= recent_uses
            if ref_count:
                entry.ref_count -= 1
                if not entry.ref_count:
                    self._use(entry.held - node.num_tokens)
                    self.in_use_tokens -= node.num_tokens
            if self._settle(node, entry):
                dropped.append(node)
            node = node.parent
        return dropped

    def set_held(self, node: Node, held: int, now: float) -> bool:
        """Note that the replica caches exactly `held` tokens of `node`. Return True if that removed the node's entry.

        A new entry comes just before that of the nearest ancestor, as if it had been used just before it. O(depth).
        """
        self.version += 1
        entry = self.entries.get(node)
        if entry is None:
            if not held:
                return False
            entry = self._add(node, now)
        if held and not _is_linked(entry):
            _link_before(entry, self._nearest_above(node))
        if not entry.ref_count:
            self._use(held - entry.held)
        entry.held = held
        if entry.names and entry.names_end > node.start + held:
            self.names.cut(entry, node.start + held)
        return self._settle(node, entry)

    def split(self, upper: Node, lower: Node) -> None:
        """`lower` was cut and its head is now `upper`: cut the entry too."""
        entry = self.entries[lower]
        self.version += 1
        head = self._add(upper, entry.last_used_s)
        if _is_linked(entry):
            _link_before(head, entry.newer)
        head.ref_count, head.recent_uses = entry.ref_count, entry.recent_uses
        head.held = min(entry.held, upper.num_tokens)
        entry.held -= head.held
        self.names.split(entry, head, upper.end)
        self._settle(upper, head)
        self._settle(lower, entry)

    def merge(self, upper: Node, lower: Node) -> None:
        """`upper` was merged into `lower`, its only child: join their entries, which `can_merge` allowed before."""
        self.version += 1
        head = self.entries.pop(upper)
        self._size.entries -= 1
        tail = self.entries[lower]
        if _is_linked(head) and not _is_linked(tail):
            _link_before(tail, head)
        _unlink(head)
        tail.held += head.held
        self.names.join(head, tail)
        self._drop(head)
        self._settle(lower, tail)

    def can_merge(self, upper: Node, lower: Node) -> bool:
        """Return True if one entry can replace the two: the same requests use both, and what is cached has no gap."""
        head, tail = self.entries[upper], self.entries[lower]
        alike = head.ref_count == tail.ref_count and head.recent_uses == tail.recent_uses
        has_no_gap = head.held == upper.num_tokens or not tail.held
        return alike and has_no_gap and self.names.can_join(head, tail)

    def oldest_first(self) -> Iterator[CacheEntry]:
        """Yield entries of what is cached or about to be, least recently used first. The last given may be changed."""
        entry = self._ring.newer
        while entry is not self._ring:
            following = entry.newer
            yield entry
            entry = following

    def check(self) -> None:
        """Assert every invariant of the entries. O(entries x depth); for tests."""
        seen: set[Node] = set()
        for entry in self.oldest_first():
            assert entry.node is not None and self.entries[entry.node] is entry
            assert not any(above in seen for above in entry.node.ancestors()[1:]), "a node goes before what is above"
            seen.add(entry.node)
        used = pinned = 0
        for node, entry in self.entries.items():
            used += entry.tokens_in(node)
            pinned += node.num_tokens if entry.ref_count else 0
            assert node.tokens and entry.node is node and node.holders & self.bit
            assert 0 <= entry.held <= node.num_tokens and entry.ref_count >= 0 and entry.recent_uses >= 0
            assert entry.held or entry.ref_count or entry.recent_uses
            assert (node in seen) == bool(entry.held or entry.ref_count)
            assert bool(node.full_holders & self.bit) == (entry.tokens_in(node) == node.num_tokens)
        assert (used, pinned) == (self.used_tokens, self.in_use_tokens)
        assert bool(self._size.crowded & self.bit) == self.is_crowded == (self.used_tokens > self.capacity)
        self.names.check(self.entries.values())

    def close(self) -> list[Node]:
        """Take the bit of the replica, which is gone, off every node; return those nodes. O(entries)."""
        self.forget_blocks()
        self._use(-self.used_tokens)
        nodes = list(self.entries)
        for node, entry in self.entries.items():
            node.holders &= ~self.bit
            node.full_holders &= ~self.bit
            node.recent_uses -= entry.recent_uses
            self._drop(entry)
        self._ring.older = self._ring.newer = self._cut = self._ring
        self._size.entries -= len(nodes)
        self.entries.clear()
        return nodes

    def _find_cut(self) -> None:
        """Find the oldest entry of which something will be left, and how much of it will be gone."""
        excess = self.used_tokens - self.capacity
        idle_tokens = self.used_tokens - self.in_use_tokens
        self._cut_in_use = in_use = idle_tokens <= excess
        if in_use:
            excess -= idle_tokens
        entry, count = self._ring.newer, 0
        while entry.node is not None:
            if (entry.ref_count > 0) == in_use:
                tokens = entry.tokens_in(entry.node)
                if tokens > excess:
                    break
                excess -= tokens
            entry = entry.newer
            count += 1
        self._num_cut = count
        self._cut, self._cut_excess = entry, excess
        self._cut_version = self.version

    def _use(self, tokens: int) -> None:
        """This many tokens more are used, or less."""
        self.used_tokens += tokens
        self.is_crowded = self.used_tokens > self.capacity
        if self.is_crowded:
            self._size.crowded |= self.bit
        else:
            self._size.crowded &= ~self.bit

    def _nearest_above(self, node: Node) -> CacheEntry:
        """Return the entry of the nearest ancestor that is in the order; else the newest end of the order."""
        for ancestor in node.ancestors():
            entry = self.entries.get(ancestor)
            if entry is not None and ancestor is not node and _is_linked(entry):
                return entry
        return self._ring

    def _add(self, node: Node, now: float) -> CacheEntry:
        entry = self.entries[node] = CacheEntry(node, now)
        self._size.entries += 1
        node.holders |= self.bit
        return entry

    def _settle(self, node: Node, entry: CacheEntry) -> bool:
        """Bring the node's masks in step with its entry, and drop the entry if it says nothing; True if dropped."""
        if entry.ref_count or entry.held == node.num_tokens:
            node.full_holders |= self.bit
            return False
        node.full_holders &= ~self.bit
        if entry.held:
            return False
        _unlink(entry)
        if entry.recent_uses:
            return False
        if entry.names:
            self.names.cut(entry, 0)
        node.holders &= ~self.bit
        del self.entries[node]
        self._size.entries -= 1
        self._drop(entry)
        return True

    def _drop(self, entry: CacheEntry) -> None:
        """Free an entry that is in use nowhere any more: one that points to itself waits for a full garbage collection,
        and serving processes run those hardly ever."""
        entry.node = None
        entry.older = entry.newer = self._ring


def _is_linked(entry: CacheEntry) -> bool:
    return entry.newer is not entry


def _link_before(entry: CacheEntry, newer: CacheEntry) -> None:
    """Put the entry just before `newer`, wherever it was."""
    if newer is entry:
        return
    _unlink(entry)
    entry.newer, entry.older = newer, newer.older
    newer.older.newer = entry
    newer.older = entry


def _unlink(entry: CacheEntry) -> None:
    entry.older.newer = entry.newer
    entry.newer.older = entry.older
    entry.older = entry.newer = entry
