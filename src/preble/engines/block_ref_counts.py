"""What one replica caches, by block hash: turns events about *copies* of blocks into events about blocks.

vLLM does not merge equal blocks: two requests that compute the same prompt at the same time store two copies, which it
announces and removes one by one, while the block stays usable until the last copy is gone. So copies are counted here,
and the scheduler hears of the first one stored and the last one removed.

Copies in the host's memory and in a store are matched by hash alone, in whatever order they are announced: vLLM may
leave out everything else and announces a block before its parent. Facts: docs/reference/engine-facts.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from preble.core.types import (
    BlockHash,
    BlocksDemoted,
    BlocksEvicted,
    BlocksShared,
    BlocksStored,
    CacheCleared,
    KvEvent,
    ReplicaId,
    Tier,
    namespace_of,
    pack_tokens,
)
from preble.engines.kv_wire import WireCleared, WireEvent, WireRemoved, WireStored
from preble.engines.media import mark_of, run_start

MAX_BLOCKS = 8_000_000
"""Blocks remembered of one replica; far more than any has, so that only a broken stream gets there."""

_PARTIAL_KINDS = frozenset(
    {
        "sliding_window",
        "sliding_window_mla",
        "chunked_local_attention",
        "mamba",
        "encoder_only_attention",
        "cross_attention",
    }
)
"""Kinds of cache that keep only a prompt's last part, a state, or no prompt at all; a hybrid model has some of them
beside the full attention that decides whether a prefix can be used."""

_HOST_MEDIA = frozenset({"CPU", "CPU_PINNED"})
"""Memory of the host: vLLM's word for it and SGLang's."""

_STORE_MEDIA = frozenset({"STORAGE", "DISK", "EXTERNAL"})
"""Disks and shared stores: vLLM's word first. What is removed there is not announced by whoever put it there."""

_UNMATCHABLE = None
"""Namespace of blocks with which no client's prompt can be compared (prompt embeddings, SGLang's images), and of all
that follow them."""


class BlockRefCounts:
    """The blocks of one replica, each with its number of copies. O(1) per block; bounded by `MAX_BLOCKS`.

    `num_orphans`: stored events so far whose parent, or an ancestor of it, was never seen here.
    """

    def __init__(self, replica_id: ReplicaId, *, reset_keeps_host: bool = True) -> None:
        """`reset_keeps_host`: whether a reset of the engine's cache leaves what it has put into its host's memory."""
        self._replica_id = replica_id
        self._reset_keeps_host = reset_keeps_host
        self._copies: dict[BlockHash, int] = {}
        """In the engine's memory; 0 where only a copy in the host's is left."""
        self._on_host: dict[BlockHash, None] = {}
        """In the order in which they were put there. Some may not be in `_copies` yet."""
        self._shared_early: dict[BlockHash, None] = {}
        """Announced as put into the store before it was announced what they hold."""
        self._namespaces: dict[BlockHash, str | None] = {}
        self._ignored_groups: set[int | None] = set()
        self._orphans: set[BlockHash] = set()
        self.num_orphans = 0

    def __len__(self) -> int:
        return len(self._copies)

    def clear(self) -> CacheCleared:
        """Forget every block."""
        for table in (self._copies, self._on_host, self._shared_early, self._namespaces):
            table.clear()
        self._ignored_groups.clear()
        self._orphans.clear()
        return CacheCleared(self._replica_id)

    def apply(self, event: WireEvent) -> Sequence[KvEvent]:
        """Count this event. Returns what changed for the scheduler."""
        match event:
            case WireStored(medium=medium) if medium in _HOST_MEDIA:
                return self._put_on_host(event)
            case WireStored(medium=medium) if medium in _STORE_MEDIA:
                return self._put_into_store(event.block_hashes)
            case WireStored():
                return self._stored(event)
            case WireRemoved():
                return self._removed(event)
            case WireCleared():
                return self._engine_cleared()

    def _stored(self, event: WireStored) -> Sequence[KvEvent]:
        if not self._is_ours(event):
            return ()
        parent = event.parent_block_hash
        # Its parent may have been stored before anybody listened. The scheduler may know where it belongs.
        is_orphan = parent is not None and (parent not in self._copies or parent in self._orphans)
        hashes = tuple(event.block_hashes)
        known = all(self._copies.get(block) for block in hashes)
        if len(self._copies) + len(hashes) > MAX_BLOCKS and not known:
            return ()
        namespace, usable = self._namespace(event)
        self._remember(hashes, namespace, usable)
        if known or not usable:
            return ()
        if is_orphan:
            self._orphans.update(hashes)
            self.num_orphans += 1
        tokens = pack_tokens(_marked(event)[: usable * event.block_size])
        named = hashes[:usable]
        stored = BlocksStored(self._replica_id, named, parent, tokens, event.block_size, namespace or "", is_orphan)
        return stored, *self._put_into_store([block for block in named if block in self._shared_early])

    def _remember(self, hashes: tuple[BlockHash, ...], namespace: str | None, usable: int) -> None:
        for i, block in enumerate(hashes):
            self._copies[block] = self._copies.get(block, 0) + 1
            own = namespace if i < usable else _UNMATCHABLE
            if own != "":
                self._namespaces[block] = own

    def _put_on_host(self, event: WireStored) -> Sequence[KvEvent]:
        if event.kv_cache_spec_kind not in _PARTIAL_KINDS and len(self._on_host) < MAX_BLOCKS:
            self._on_host |= dict.fromkeys(event.block_hashes)
        return ()

    def _put_into_store(self, blocks: Sequence[BlockHash]) -> Sequence[KvEvent]:
        for block in blocks:
            if block in self._copies:
                self._shared_early.pop(block, None)
            elif len(self._shared_early) < MAX_BLOCKS:
                self._shared_early[block] = None
        shared = tuple(block for block in blocks if block in self._copies and self._is_matchable(block))
        return [BlocksShared(self._replica_id, shared)] if shared else ()

    def _removed(self, event: WireRemoved) -> Sequence[KvEvent]:
        if event.group_idx in self._ignored_groups or event.medium in _STORE_MEDIA:
            return ()
        if event.medium in _HOST_MEDIA:
            gone = tuple(block for block in event.block_hashes if self._drop_from_host(block))
            return [BlocksEvicted(self._replica_id, gone, Tier.HOST)] if gone else ()
        dropped = [block for block in event.block_hashes if self._drop_copy(block)]
        return [change for block in dropped for change in self._left(block)]

    def _drop_copy(self, block: BlockHash) -> bool:
        """Whether that was the last copy of a block in the engine's memory."""
        if (copies := self._copies.get(block, 0)) > 0:
            self._copies[block] = copies - 1
        return copies == 1

    def _left(self, block: BlockHash) -> Sequence[KvEvent]:
        """What the scheduler hears of a block that is no longer in the engine's memory."""
        if block not in self._on_host:
            return [BlocksEvicted(self._replica_id, (block,))] if self._forget(block) else ()
        return [BlocksDemoted(self._replica_id, (block,), Tier.HOST)] if self._is_matchable(block) else ()

    def _is_matchable(self, block: BlockHash) -> bool:
        return self._namespaces.get(block, "") is not _UNMATCHABLE

    def _drop_from_host(self, block: BlockHash) -> bool:
        """Whether that was the last copy of a block that the scheduler knows."""
        self._on_host.pop(block, None)
        return self._copies.get(block) == 0 and self._forget(block)

    def _forget(self, block: BlockHash) -> bool:
        """Whether the scheduler knows the block that is no longer cached."""
        known = self._copies.pop(block, None) is not None
        self._orphans.discard(block)
        return self._namespaces.pop(block, "") is not _UNMATCHABLE and known

    def _engine_cleared(self) -> Sequence[KvEvent]:
        """The engine's memory is empty, which does not say that its host's is."""
        kept = [block for block in self._on_host if block in self._copies] if self._reset_keeps_host else []
        if not kept:
            return [self.clear()]
        demoted = [change for block in kept if self._copies[block] for change in self._left(block)]
        self._copies = dict.fromkeys(kept, 0)
        self._namespaces = {block: name for block, name in self._namespaces.items() if block in self._copies}
        self._orphans &= self._copies.keys()
        return [*demoted, CacheCleared(self._replica_id, engine_only=True)]

    def _is_ours(self, event: WireStored) -> bool:
        """Whether it is about the cache that decides hits: in GPU memory, kept for whole prompts."""
        if not event.is_on_device:
            return False
        if event.kv_cache_spec_kind in _PARTIAL_KINDS:
            self._ignored_groups.add(event.group_idx)
            return False
        return True

    def _namespace(self, event: WireStored) -> tuple[str | None, int]:
        """The namespace of these blocks, and how many of them can be compared with a prompt.

        Only a prompt's first block names its cache salt; later ones have it from their parent.
        """
        foreign = [self._foreign_keys(event, i) for i in range(len(event.block_hashes))]
        parent = event.parent_block_hash
        if parent is not None:
            namespace = self._namespaces.get(parent, "")
        else:
            keyed = next((key for key in foreign[0] if isinstance(key, str)), None) if foreign else None
            salt = event.cache_salt if isinstance(event.cache_salt, str) else keyed
            namespace = namespace_of(event.lora_name, salt)
            if foreign and foreign[0] == [keyed]:
                foreign[0] = []
        if namespace is _UNMATCHABLE:
            return _UNMATCHABLE, 0
        return namespace, min(len(list(takewhile(lambda keys: not keys, foreign))), _num_narrow_blocks(event))

    @staticmethod
    def _foreign_keys(event: WireStored, block: int) -> list[object]:
        """What block number `block` was hashed with, apart from tokens, media and the adapter's name."""
        keys = [key for key in _extra_keys(event, block) if _as_medium(key) is None]
        return keys[1:] if keys and event.lora_name and keys[0] == event.lora_name else keys


def _extra_keys(event: WireStored, block: int) -> Sequence[object]:
    return (event.extra_keys[block] if event.extra_keys else None) or ()


def _as_medium(key: object) -> tuple[str, int] | None:
    """The identifier of an image, video or sound, and where it begins relative to the block; None for another key."""
    match key:
        case [str(identifier), int(offset)]:
            return identifier, offset
    return None


def _marked(event: WireStored) -> list[int]:
    """Its token ids, with a mark where an image, video or sound begins."""
    if event.extra_keys is None:
        return event.token_ids
    token_ids = event.token_ids.copy()
    for block in range(len(event.block_hashes)):
        for medium in filter(None, map(_as_medium, _extra_keys(event, block))):
            identifier, offset = medium
            if 0 <= offset < event.block_size:
                token_ids[run_start(event.token_ids, block * event.block_size + offset)] = mark_of(identifier)
    return token_ids


def _num_narrow_blocks(event: WireStored) -> int:
    """How many blocks come before the first one with a token id that is a hash."""
    if max(event.token_ids, default=0) < 2**32:
        return len(event.block_hashes)
    return next(i for i, token_id in enumerate(event.token_ids) if token_id >= 2**32) // event.block_size
