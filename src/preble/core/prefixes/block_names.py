"""The names of one replica's KV blocks: four bytes a block, kept with the cache entry that they end in.

An engine reports a block by a hash. Four bytes of it distinguish the blocks of one replica, and the blocks of a node
follow one another, so their names are one string of bytes. Only the last name of a node is in a table, and that is
enough for nearly all reports: engines evict a prompt from its end, and they store new blocks below the last one of a
shared prefix, at whose end the tree was split when the request was placed. Other names are searched for.

Blocks of fewer than `NAMED_TOKENS` tokens do not all have names: only one in each `NAMED_TOKENS` tokens, counted from
the prompt's start, and the last one of a node. So pages of one token take no more memory than blocks of 16. An eviction
that begins between two names counts from the first of them on. A parent between two names is found by the prompt that
was served there (`next_of`, `find_parent`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from struct import error, pack

from preble.core.prefixes.cache_entry import NAME_BYTES, CacheEntry, IndexSize
from preble.core.types import BlockHash

NAMED_TOKENS = 16
"""Of the blocks that end within this many tokens, at least one has a name."""


def pack_names(block_hashes: Sequence[BlockHash]) -> bytes:
    """The names of blocks, one after the other. O(blocks).

    >>> len(pack_names([-(2**63), b"an engine's hash", 2**64 - 1]))
    12
    """
    for kind in ("q", "Q"):  # vLLM's hashes have 64 bits without a sign, SGLang's with one
        try:
            return array("I", pack(f"{len(block_hashes)}{kind}", *block_hashes))[::2].tobytes()
        except error:
            continue
    return b"".join([_name(block_hash) for block_hash in block_hashes])


def kept_names(names: bytes, end: int, block_size: int) -> bytes:
    """Those of the names of consecutive blocks, the last of which ends at token `end`, that an entry keeps.

    >>> len(kept_names(pack_names(range(40)), 40, 1)) // 4
    3
    """
    stride = _spacing(block_size) // block_size
    if stride == 1:
        return names
    beyond = (end - _grid_end(end, block_size)) // block_size
    count = len(names) // NAME_BYTES - beyond
    if not beyond:
        return array("I", names)[(count - 1) % stride :: stride].tobytes()
    if count <= 0:
        return names[-NAME_BYTES:]
    return array("I", names)[(count - 1) % stride : count : stride].tobytes() + names[-NAME_BYTES:]


def _name(block_hash: BlockHash) -> bytes:
    if isinstance(block_hash, bytes):
        return block_hash[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    return array("I", [block_hash & 0xFFFFFFFF]).tobytes()


def _spacing(block_size: int) -> int:
    """Tokens between two names, but for the last one of an entry, which may be nearer."""
    return block_size if block_size >= NAMED_TOKENS else NAMED_TOKENS // block_size * block_size


def _grid_end(end: int, block_size: int) -> int:
    """Where the last block ends that has a name not only for being the last one, which ends at token `end`."""
    return end if block_size >= NAMED_TOKENS else end - end % _spacing(block_size)


def _end_of(entry: CacheEntry, at: int) -> int:
    """The token at which the block of name number `at` ends; -1 is for the one before the first."""
    last = len(entry.names) // NAME_BYTES - 1
    if at == last:
        return entry.names_end
    grid_end = _grid_end(entry.names_end, entry.block_size)
    if grid_end != entry.names_end:
        last -= 1
    return grid_end - (last - at) * _spacing(entry.block_size)


def _start_of(entry: CacheEntry, at: int) -> int:
    """The token from which on nothing is known to be cached once the block of name number `at` is gone.

    Which of the blocks since the name before it are gone as well is not known, so none of them counts.
    """
    start = _end_of(entry, at - 1)
    if at or entry.node is None or entry.block_size >= NAMED_TOKENS:
        return start
    return max(start, entry.node.start // entry.block_size * entry.block_size)


def _count_until(entry: CacheEntry, end: int) -> int:
    """The number of its names of blocks that end at token `end` or before."""
    count = len(entry.names) // NAME_BYTES
    if not count or entry.names_end <= end:
        return count
    grid_end = _grid_end(entry.names_end, entry.block_size)
    if grid_end != entry.names_end:
        count -= 1
    return max(count - max(-((end - grid_end) // _spacing(entry.block_size)), 0), 0)


def _joined(kept: bytes, kept_end: int, names: bytes, end: int, block_size: int) -> tuple[bytes, int]:
    """The names of an entry that has some and gets others; only the others if they do not follow on."""
    spacing, kept_grid, new_grid = _spacing(block_size), _grid_end(kept_end, block_size), _grid_end(end, block_size)
    old = kept if kept_grid == kept_end else kept[:-NAME_BYTES]
    new = names if new_grid == end else names[:-NAME_BYTES]
    num_old, num_new = len(old) // NAME_BYTES, len(new) // NAME_BYTES
    at, rest = divmod(new_grid - kept_grid + (num_old - num_new) * spacing, spacing)
    if rest or not 0 <= at <= num_old:
        return names, end
    last = names[len(new) :] if end >= kept_end else kept[len(old) :]
    return old[: at * NAME_BYTES] + new + old[(at + num_new) * NAME_BYTES :] + last, max(end, kept_end)


class _Lost:
    """What an entry had before names of it were popped; `start`: the first token that is gone."""

    __slots__ = ("end", "names", "start")

    def __init__(self, names: bytes, end: int) -> None:
        self.names = names
        self.end = end
        self.start = end


class BlockNames:
    """The names of the blocks in each entry of one replica. Every change of `CacheEntry.names` goes through here."""

    __slots__ = ("_last", "_size")

    def __init__(self, size: IndexSize) -> None:
        self._last: dict[bytes, CacheEntry] = {}
        self._size = size

    def add(self, entry: CacheEntry, names: bytes, end: int, block_size: int) -> None:
        """Consecutive blocks have these names, of which `kept_names` are left; the last one ends at token `end`.

        They join the names that the entry has, or replace them where they do not follow on.
        """
        if entry.names and entry.block_size == block_size:
            names, end = _joined(entry.names, entry.names_end, names, end, block_size)
        entry.block_size = block_size
        self._set(entry, names, end)

    def ends(self, block_hashes: Sequence[BlockHash]) -> list[CacheEntry]:
        """The entries whose last block is one of these. O(blocks)."""
        names = pack_names(block_hashes)
        found = [self._last.get(names[at : at + NAME_BYTES]) for at in range(0, len(names), NAME_BYTES)]
        return [entry for entry in found if entry is not None]

    def is_end(self, block_hash: BlockHash) -> bool:
        """Whether the block is the last one of an entry. O(1)."""
        return pack_names((block_hash,)) in self._last

    def find(self, block_hash: BlockHash, entries: Iterable[CacheEntry]) -> tuple[CacheEntry, int] | None:
        """The entry that has a block of this name, and the token at which the block ends; None if none has."""
        name = pack_names((block_hash,))
        entry = self._last.get(name)
        if entry is not None:
            return entry, entry.names_end
        for entry in entries:
            if entry.names and (at := _index_of(name, entry.names)) >= 0:
                return entry, _end_of(entry, at)
        return None

    def pop(self, block_hashes: Sequence[BlockHash], entries: Iterable[CacheEntry]) -> dict[CacheEntry, _Lost]:
        """Forget these names, and in each entry those after them; returns the entries that lost some.

        O(blocks), or O(names) if one of them is not at the end of its entry.
        """
        lost: dict[CacheEntry, _Lost] = {}
        left = pack_names(block_hashes)
        num_left = 2 * len(left)
        while 0 < len(left) < num_left:  # vLLM names the last block of a prompt first, SGLang the first one
            num_left = len(left)
            left = self._pop_from_ends(_reversed(left), lost)
        if left and all(entry.block_size >= NAMED_TOKENS for entry in lost):
            for entry in entries:
                if entry.names and (at := _index_of(left[:NAME_BYTES], entry.names)) >= 0:
                    lost[entry] = _Lost(entry.names, entry.names_end)
                    lost[entry].start = _start_of(entry, at)
                    self._keep(entry, at)
                    break
        return lost

    def _pop_from_ends(self, names: bytes, lost: dict[CacheEntry, _Lost]) -> bytes:
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
            if entry not in lost:
                lost[entry] = _Lost(entry.names, entry.names_end)
            left -= self._pop_run(entry, names, left, lost[entry])
        others.reverse()
        return b"".join(others)

    def _pop_run(self, entry: CacheEntry, names: bytes, left: int, lost: _Lost) -> int:
        """Forget the last name of an entry and those before it that `names` has up to `left`; returns their bytes."""
        kept = entry.names
        size = min(len(kept), left)
        if entry.block_size >= NAMED_TOKENS:
            if not kept.endswith(names[left - size : left]):
                size = NAME_BYTES
                while kept.endswith(names[left - size - NAME_BYTES : left]):
                    size += NAME_BYTES
            self._keep(entry, (len(kept) - size) // NAME_BYTES)
            lost.start = entry.names_end
            return size
        at, used, block_size = len(kept) // NAME_BYTES - 1, NAME_BYTES, entry.block_size
        while at:
            step = (_end_of(entry, at) - _end_of(entry, at - 1)) // block_size * NAME_BYTES
            before = names[left - used - step : left - used - step + NAME_BYTES] if used + step <= left else b""
            if before != kept[(at - 1) * NAME_BYTES : at * NAME_BYTES]:
                break
            at, used = at - 1, used + step
        lost.start = _start_of(entry, at)
        self._keep(entry, at)
        return used

    def cut(self, entry: CacheEntry, end: int) -> None:
        """Forget the names of an entry's blocks that end after token `end`."""
        self._keep(entry, _count_until(entry, end))

    def split(self, entry: CacheEntry, head: CacheEntry, end: int) -> None:
        """The node was cut after token `end`, and `head` is the new entry of its upper part."""
        above = _count_until(entry, end)
        if not above:
            return
        names, head_end = entry.names, _end_of(entry, above - 1)
        head.block_size = entry.block_size
        self._set(entry, names[above * NAME_BYTES :], entry.names_end)
        self._set(head, names[: above * NAME_BYTES], head_end)

    def can_join(self, head: CacheEntry, tail: CacheEntry) -> bool:
        """Whether the names of two entries, one above the other, are consecutive."""
        if not head.names or not tail.names:
            return True
        if head.block_size != tail.block_size:
            return False
        gap, spacing = _end_of(tail, 0) - _grid_end(head.names_end, head.block_size), _spacing(tail.block_size)
        return gap == spacing or (0 < gap < spacing and len(tail.names) == NAME_BYTES)

    def join(self, head: CacheEntry, tail: CacheEntry) -> None:
        """`tail` gets the names of `head`, whose node is merged into its own."""
        if not head.names:
            return
        names, end = head.names, head.names_end
        self._set(head, b"", end)
        tail.block_size = head.block_size
        if tail.names and _grid_end(end, head.block_size) != end:
            names = names[:-NAME_BYTES]
        self._set(tail, names + tail.names, tail.names_end if tail.names else end)

    def clear(self, entries: Iterable[CacheEntry]) -> None:
        """Forget all names. O(entries)."""
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
            assert _end_of(entry, 0) > entry.node.start

    def _keep(self, entry: CacheEntry, count: int) -> None:
        """Forget all but the first `count` names of an entry."""
        if count * NAME_BYTES < len(entry.names):
            self._set(entry, entry.names[: count * NAME_BYTES], _end_of(entry, count - 1))

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
    """Where `name` is among `names`; -1 if it is not."""
    at = names.find(name)
    while at > 0 and at % NAME_BYTES:
        at = names.find(name, at + 1)
    return at // NAME_BYTES if at >= 0 else -1
