"""What one replica is believed to hold: a record per tree node, in the order in which the replica would evict.

The order is least recently used first, and a node always comes before its ancestors (whoever uses a prefix uses all of
it), so that walking from the old end meets leaves first, as the engines' own LRU does. Only what is held or about to be
held is in the order; a record that merely counts requests is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

from preble.core.prefixes.radix_tree import Node, live_node
from preble.core.types import BlockHash

RECORD_BYTES, BLOCK_BYTES = 170, 200
"""What a record and a block's name take, measured on CPython 3.11 (benchmarks/micro/place.py --memory)."""


class CacheEntry:
    """One node on one replica.

    `held`: leading tokens of the node that the replica holds. `pins`: requests in flight there that use the node; while
    there are any, the whole node is held or about to be. `shares`: requests of the window placed there that use it.
    `last_used_s`: when a request that uses it was last placed there.
    """

    __slots__ = ("held", "last_used_s", "newer", "node", "older", "pins", "shares")

    def __init__(self, node: Node | None, last_used_s: float) -> None:
        self.node = node
        self.held = 0
        self.pins = 0
        self.shares = 0
        self.last_used_s = last_used_s
        self.older: CacheEntry = self
        self.newer: CacheEntry = self

    def tokens_in(self, node: Node) -> int:
        """Leading tokens of `node` (this record's own) that are held or about to be."""
        return node.num_tokens if self.pins else self.held


class IndexSize:
    """Counts over all replicas, for the index's byte budget."""

    __slots__ = ("blocks", "records")

    def __init__(self) -> None:
        self.records = 0
        self.blocks = 0

    @property
    def num_bytes(self) -> int:
        """Memory of records and names, by count."""
        return self.records * RECORD_BYTES + self.blocks * BLOCK_BYTES


class ReplicaCache:
    """The records of one replica. `bit`: its bit in the nodes' masks. `used_tokens`: held or about to be, in all.

    `pinned_tokens`: those of them that requests in flight use, each once. `version` grows with every change.
    Keeps the masks of the nodes in step with the records. Every change of a record goes through a method here.
    """

    __slots__ = ("_blocks", "_records", "_ring", "_size", "bit", "pinned_tokens", "used_tokens", "version")

    def __init__(self, replica: int, size: IndexSize) -> None:
        self.bit = 1 << replica
        self.used_tokens = 0
        self.pinned_tokens = 0
        self.version = 0
        self._size = size
        self._blocks: dict[BlockHash, tuple[Node, int]] = {}
        self._records: dict[Node, CacheEntry] = {}
        self._ring = CacheEntry(None, 0.0)

    def __len__(self) -> int:
        return len(self._records)

    def oldest_idle(self) -> CacheEntry | None:
        """The least recently used record that is held and not in use. O(1 + records in use that are older)."""
        return next((record for record in self.oldest_first() if not record.pins), None)

    def block(self, block_hash: BlockHash) -> tuple[Node, int] | None:
        """The node in which a block ends and the prompt tokens up to there; None if unknown or out of the tree."""
        found = self._blocks.get(block_hash)
        if found is None:
            return None
        node = live_node(*found)
        return (node, found[1]) if node.start < found[1] <= node.end else None

    def name_blocks(self, block_hashes: Sequence[BlockHash], node: Node, ends: range) -> None:
        """The replica calls blocks by these names; they end in `node`, so many tokens from the start of the prompt."""
        before = len(self._blocks)
        self._blocks.update(zip(block_hashes, zip(repeat(node), ends, strict=False), strict=False))
        self._size.blocks += len(self._blocks) - before

    def forget_names(self, block_hashes: Iterable[BlockHash]) -> list[tuple[Node, int]]:
        """The replica uses these names no longer; returns what those that were known stood for (see `live_node`)."""
        pop = self._blocks.pop
        found = [block for block_hash in block_hashes if (block := pop(block_hash, None)) is not None]
        self._size.blocks -= len(found)
        return found

    def forget_blocks(self) -> None:
        self._size.blocks -= len(self._blocks)
        self._blocks.clear()

    def get(self, node: Node) -> CacheEntry | None:
        return self._records.get(node)

    def tokens_in(self, node: Node) -> int:
        """Leading tokens of `node` that the replica holds or is about to hold."""
        record = self._records.get(node)
        return 0 if record is None else record.tokens_in(node)

    def tokens_held(self, node: Node) -> int:
        """Leading tokens of `node` that the replica holds already."""
        record = self._records.get(node)
        return 0 if record is None else record.held

    def records(self) -> Iterator[CacheEntry]:
        """Every record, in no particular order."""
        return iter(self._records.values())

    def pin_and_share(self, path: list[Node], now: float) -> None:
        """A request that uses `path` was placed here. O(depth)."""
        self.version += 1
        for node in reversed(path):
            record = self._records.get(node)
            if record is None:
                record = self._add(node, now)
            _link_before(record, self._ring)
            record.last_used_s = now
            record.shares += 1
            node.num_shares += 1
            record.pins += 1
            if record.pins == 1:
                self.used_tokens += node.num_tokens - record.held
                self.pinned_tokens += node.num_tokens
                node.full_holders |= self.bit

    def unpin(self, leaf: Node) -> list[Node]:
        """A request that used the path to `leaf` is over here; returns the nodes that lost their record."""
        return self._walk_up(leaf, pins=1, shares=0)

    def unshare(self, leaf: Node) -> list[Node]:
        """A request that used the path to `leaf` left the window; returns the nodes that lost their record."""
        return self._walk_up(leaf, pins=0, shares=1)

    def set_held(self, node: Node, held: int, now: float) -> bool:
        """The replica holds just the first `held` tokens of `node`; True if the node's record is gone by that.

        A new record is placed as if it had been used just before the nearest ancestor that has one. O(depth).
        """
        self.version += 1
        record = self._records.get(node)
        if record is None:
            if not held:
                return False
            record = self._add(node, now)
        if held and not _is_linked(record):
            _link_before(record, self._nearest_above(node))
        if not record.pins:
            self.used_tokens += held - record.held
        record.held = held
        return self._settle(node, record)

    def split(self, upper: Node, lower: Node) -> None:
        """`lower` was cut and its head is `upper` now: cut the record too."""
        record = self._records[lower]
        self.version += 1
        head = self._add(upper, record.last_used_s)
        if _is_linked(record):
            _link_before(head, record.newer)
        head.pins, head.shares = record.pins, record.shares
        head.held = min(record.held, upper.num_tokens)
        record.held -= head.held
        self._settle(upper, head)
        self._settle(lower, record)

    def merge(self, upper: Node, lower: Node) -> None:
        """`upper` was merged into `lower`, its only child: join their records, which `can_merge` allowed before."""
        self.version += 1
        head = self._records.pop(upper)
        self._size.records -= 1
        tail = self._records[lower]
        if _is_linked(head) and not _is_linked(tail):
            _link_before(tail, head)
        _unlink(head)
        tail.held += head.held
        self._settle(lower, tail)

    def can_merge(self, upper: Node, lower: Node) -> bool:
        """True if one record could say what the two say: the same requests use both, and what is held is contiguous."""
        head, tail = self._records[upper], self._records[lower]
        alike = head.pins == tail.pins and head.shares == tail.shares
        return alike and (head.held == upper.num_tokens or not tail.held)

    def oldest_first(self) -> Iterator[CacheEntry]:
        """What is held or about to be, from the least recently used. The record just yielded may be changed."""
        record = self._ring.newer
        while record is not self._ring:
            following = record.newer
            yield record
            record = following

    def check(self) -> None:
        """Every invariant of the records. O(records x depth); for tests."""
        seen: set[Node] = set()
        for record in self.oldest_first():
            assert record.node is not None and self._records[record.node] is record
            assert not any(above in seen for above in list(record.node.ancestors())[1:]), (
                "a node goes before what is above"
            )
            seen.add(record.node)
        used = pinned = 0
        for node, record in self._records.items():
            used += record.tokens_in(node)
            pinned += node.num_tokens if record.pins else 0
            assert node.tokens and record.node is node and node.holders & self.bit
            assert 0 <= record.held <= node.num_tokens and record.pins >= 0 and record.shares >= 0
            assert record.held or record.pins or record.shares
            assert (node in seen) == bool(record.held or record.pins)
            assert bool(node.full_holders & self.bit) == (record.tokens_in(node) == node.num_tokens)
        assert (used, pinned) == (self.used_tokens, self.pinned_tokens)

    def close(self) -> list[Node]:
        """The replica is gone: take its bit off every node; returns those nodes. O(records)."""
        self.forget_blocks()
        nodes = list(self._records)
        for node, record in self._records.items():
            node.holders &= ~self.bit
            node.full_holders &= ~self.bit
            node.num_shares -= record.shares
        self._size.records -= len(nodes)
        self._records.clear()
        return nodes

    def _nearest_above(self, node: Node) -> CacheEntry:
        """The record of the nearest ancestor that is in the order, else the order's newest end."""
        for ancestor in node.ancestors():
            record = self._records.get(ancestor)
            if record is not None and ancestor is not node and _is_linked(record):
                return record
        return self._ring

    def _add(self, node: Node, now: float) -> CacheEntry:
        record = self._records[node] = CacheEntry(node, now)
        self._size.records += 1
        node.holders |= self.bit
        return record

    def _walk_up(self, leaf: Node, pins: int, shares: int) -> list[Node]:
        self.version += 1
        dropped = []
        node = leaf
        while node.parent is not None:
            record = self._records[node]
            record.shares -= shares
            node.num_shares -= shares
            if pins:
                record.pins -= 1
                if not record.pins:
                    self.used_tokens -= node.num_tokens - record.held
                    self.pinned_tokens -= node.num_tokens
            if self._settle(node, record):
                dropped.append(node)
            node = node.parent
        return dropped

    def _settle(self, node: Node, record: CacheEntry) -> bool:
        """Bring the node's masks in step with its record, drop the record if it says nothing; True if dropped."""
        if record.pins or record.held == node.num_tokens:
            node.full_holders |= self.bit
            return False
        node.full_holders &= ~self.bit
        if record.held:
            return False
        _unlink(record)
        if record.shares:
            return False
        node.holders &= ~self.bit
        del self._records[node]
        self._size.records -= 1
        return True


def _is_linked(record: CacheEntry) -> bool:
    return record.newer is not record


def _link_before(record: CacheEntry, newer: CacheEntry) -> None:
    """Put the record just before `newer`, wherever it was."""
    if newer is record:
        return
    _unlink(record)
    record.newer, record.older = newer, newer.older
    newer.older.newer = record
    newer.older = record


def _unlink(record: CacheEntry) -> None:
    record.older.newer = record.newer
    record.newer.older = record.older
    record.older = record.newer = record
