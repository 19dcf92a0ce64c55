"""The names of one replica's KV blocks: four bytes a block, kept with the cache entry that they end in.

An engine reports a block by a hash. Four bytes of it distinguish the blocks of one replica, and the blocks of a node
follow one another, so their names are one string of bytes. Only the last name of a node is in a table, and that is
enough for nearly all reports: engines evict a prompt from its end, and they store new blocks below the last one of a
shared prefix, at whose end the tree was split when the request was placed. Other names are searched for.

vLLM does not merge equal blocks: two requests that compute the same prompt at the same time store two copies, which it
announces and removes one by one, while the block stays usable until the last copy is gone. So the copies of a block are
counted where it has more than one. Those counts outlive a name that the index forgets, as the copies do.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from struct import error, pack
from sys import byteorder

from preble.core.prefixes.cache_entry import NAME_BYTES, CacheEntry, IndexSize
from preble.core.types import BlockHash, PackedHashes


def pack_names(block_hashes: Sequence[BlockHash]) -> bytes:
    """Return the names of blocks, one after the other. O(blocks).

    >>> len(pack_names([-(2**63), b"an engine's hash", 2**64 - 1]))
    12
    """
    if isinstance(block_hashes, PackedHashes):
        return array("I", block_hashes.packed)[::2].tobytes()
    for kind in ("q", "Q"):  # vLLM's hashes have 64 bits without a sign, SGLang's with one
        try:
            return array("I", pack(f"{len(block_hashes)}{kind}", *block_hashes))[::2].tobytes()
        except error:
            continue
    return b"".join([pack_name(block_hash) for block_hash in block_hashes])


def pack_name(block_hash: BlockHash) -> bytes:
    if isinstance(block_hash, bytes):
        return block_hash[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    return (block_hash & 0xFFFFFFFF).to_bytes(NAME_BYTES, byteorder)


class BlockNames:
    """The names of the blocks in each entry of one replica. Every change of `CacheEntry.names` goes through here."""

    __slots__ = ("_further", "_last", "_size")

    def __init__(self, size: IndexSize) -> None:
        self._last: dict[bytes, CacheEntry] = {}
        self._further: dict[bytes, int] = {}
        """How many copies there are besides the first, of blocks with more than one."""
        self._size = size

    def add(self, entry: CacheEntry, names: bytes, end: int, block_size: int, *, are_copies: bool) -> None:
        """Consecutive blocks have these names; the last one ends at token `end`.

        They join the names that the entry has, or replace them where they do not follow on. `are_copies`: where a block
        has its name already, this is one copy more of it.
        """
        kept, count = entry.names, len(names) // NAME_BYTES
        if kept:
            first_end = entry.names_end - (len(kept) // NAME_BYTES - 1) * block_size
            at, rest = divmod(end - (count - 1) * block_size - first_end, block_size)
            if entry.block_size == block_size and not rest and 0 <= at <= len(kept) // NAME_BYTES:
                if are_copies and at < len(kept) // NAME_BYTES:
                    self._add_copies(names, kept[at * NAME_BYTES : (at + count) * NAME_BYTES])
                names = kept[: at * NAME_BYTES] + names + kept[(at + count) * NAME_BYTES :]
                end = max(end, entry.names_end)
        entry.block_size = block_size
        self._set(entry, names, end)

    def _add_copies(self, names: bytes, known: bytes) -> None:
        for at in range(0, len(known), NAME_BYTES):
            name = names[at : at + NAME_BYTES]
            if name == known[at : at + NAME_BYTES]:
                self._further[name] = further = self._further.get(name, 0) + 1
                self._size.copied += further == 1

    def _drop_copies(self, names: bytes) -> bytes:
        """Take one copy from each of these blocks; returns the names of those that had only one."""
        last = []
        for at in range(0, len(names), NAME_BYTES):
            name = names[at : at + NAME_BYTES]
            further = self._further.get(name, 0)
            if not further:
                last.append(name)
            elif further > 1:
                self._further[name] = further - 1
            else:
                del self._further[name]
                self._size.copied -= 1
        return b"".join(last)

    def ends(self, block_hashes: Sequence[BlockHash]) -> list[CacheEntry]:
        """Return the entries whose last block is one of these. O(blocks)."""
        names = pack_names(block_hashes)
        found = [self._last.get(names[at : at + NAME_BYTES]) for at in range(0, len(names), NAME_BYTES)]
        return [entry for entry in found if entry is not None]

    def find(self, block_hash: BlockHash, entries: Iterable[CacheEntry]) -> tuple[CacheEntry, int] | None:
        """Return the entry that has a block of this name, and the token at which the block ends; None if none has."""
        name = pack_name(block_hash)
        entry = self._last.get(name)
        if entry is not None:
            return entry, entry.names_end
        for entry in entries:
            if entry.names and (at := _index_of(name, entry.names)) >= 0:
                return entry, entry.names_end - (len(entry.names) // NAME_BYTES - 1 - at) * entry.block_size
        return None

    def pop(self, block_hashes: Sequence[BlockHash], entries: Iterable[CacheEntry]) -> dict[CacheEntry, bytes]:
        """Forget one copy of these blocks: the names of those that had only one, and in each entry those after
        them. Returns the entries that lost some, and what they had before.

        Each then has as `names_end` the token at which the first block begins that it lost. O(blocks), or O(names) if
        one of them is not at the end of its entry.
        """
        lost: dict[CacheEntry, bytes] = {}
        left = pack_names(block_hashes)
        if self._further:
            left = self._drop_copies(left)
        num_left = 2 * len(left)
        while 0 < len(left) < num_left:  # vLLM names the last block of a prompt first, SGLang the first one
            num_left = len(left)
            left = self._pop_from_ends(_reversed(left), lost)
        if left:
            for entry in entries:
                if entry.names and (at := _index_of(left[:NAME_BYTES], entry.names)) >= 0:
                    blocks_after = len(entry.names) // NAME_BYTES - at
                    lost.setdefault(entry, entry.names)
                    self._set(entry, entry.names[: at * NAME_BYTES], entry.names_end - blocks_after * entry.block_size)
                    break
        return lost

    def _pop_from_ends(self, names: bytes, lost: dict[CacheEntry, bytes]) -> bytes:
        """Forget those that are the last of an entry, from the last one on; returns the others, in the same order."""
        others: list[bytes] = []
        left = len(names)
        while left:
            name = names[left - NAME_BYTES : left]
            entry = self._last.get(name)
            if entry is None:
                others.append(name)
                left -= NAME_BYTES
                continue
            kept = entry.names
            size = min(len(kept), left)
            if not kept.endswith(names[left - size : left]):
                size = NAME_BYTES
                while kept.endswith(names[left - size - NAME_BYTES : left]):
                    size += NAME_BYTES
            self._set(entry, kept[: len(kept) - size], entry.names_end - size // NAME_BYTES * entry.block_size)
            if entry not in lost:
                lost[entry] = kept
            left -= size
        others.reverse()
        return b"".join(others)

    def cut(self, entry: CacheEntry, end: int) -> None:
        """Forget the names of an entry's blocks that end after token `end`."""
        count = len(entry.names) // NAME_BYTES
        gone = min(-((end - entry.names_end) // entry.block_size), count)
        self._set(entry, entry.names[: (count - gone) * NAME_BYTES], entry.names_end - gone * entry.block_size)

    def split(self, entry: CacheEntry, head: CacheEntry, end: int) -> None:
        """The node was cut after token `end`, and `head` is the new entry of its upper part."""
        if not entry.names or entry.names_end - len(entry.names) // NAME_BYTES * entry.block_size >= end:
            return
        names, names_end, block_size = entry.names, entry.names_end, entry.block_size
        below = min(max(-((end - names_end) // block_size), 0), len(names) // NAME_BYTES)
        size = len(names) - below * NAME_BYTES
        head.block_size = block_size
        self._set(entry, names[size:], names_end)
        self._set(head, names[:size], names_end - below * block_size)

    def can_join(self, head: CacheEntry, tail: CacheEntry) -> bool:
        """Return whether the names of two entries, one above the other, are consecutive."""
        if not head.names or not tail.names:
            return True
        first_end = tail.names_end - (len(tail.names) // NAME_BYTES - 1) * tail.block_size
        return head.block_size == tail.block_size and head.names_end + head.block_size == first_end

    def join(self, head: CacheEntry, tail: CacheEntry) -> None:
        """`tail` gets the names of `head`, whose node is merged into its own."""
        if not head.names:
            return
        names, end = head.names, head.names_end
        self._set(head, b"", end)
        tail.block_size = head.block_size
        self._set(tail, names + tail.names, tail.names_end if tail.names else end)

    def clear(self, entries: Iterable[CacheEntry]) -> None:
        """Forget all names and copies. O(entries)."""
        self._size.copied -= len(self._further)
        self._further.clear()
        for entry in entries:
            if entry.names:
                self._set(entry, b"", entry.names_end)

    def check(self, entries: Iterable[CacheEntry]) -> None:
        """Assert that the table has the last names. O(entries); for tests."""
        named = [entry for entry in entries if entry.names]
        assert set(self._last.values()) <= set(named)
        for entry in named:
            assert entry.node is not None
            assert not len(entry.names) % NAME_BYTES and entry.block_size > 0
            assert entry.node.start < entry.names_end <= entry.node.end
            assert (
                entry.names_end - len(entry.names) // NAME_BYTES * entry.block_size + entry.block_size
                > entry.node.start
            )

    def _set(self, entry: CacheEntry, names: bytes, end: int) -> None:
        before = entry.names
        if before:
            last = before[-NAME_BYTES:]
            if self._last.get(last) is entry:
                del self._last[last]
        if names:
            self._last[names[-NAME_BYTES:]] = entry
        entry.names, entry.names_end = names, end
        self._size.names += (len(names) - len(before)) // NAME_BYTES
        self._size.runs += bool(names) - bool(before)


def _reversed(names: bytes) -> bytes:
    return array("I", names)[::-1].tobytes()


def _index_of(name: bytes, names: bytes) -> int:
    """Return where `name` is among `names`; -1 if it is not."""
    at = names.find(name)
    while at > 0 and at % NAME_BYTES:
        at = names.find(name, at + 1)
    return at // NAME_BYTES if at >= 0 else -1
