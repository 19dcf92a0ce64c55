"""What one replica's KV events mean for the scheduler: which of its caches they are about, and in which namespace.

Copies in the engine's memory are passed on one by one: the scheduler counts them. Copies in the host's memory and in a
store are matched by hash alone, in whatever order they are announced: vLLM may leave out everything else and announces
a block before its parent. Facts: docs/reference/engine-facts.md.

So nothing is kept here of a block that is in the engine's memory alone, as nearly all are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile

from preble.core.types import (
    TOKEN_BYTES,
    BlockHash,
    BlockHashes,
    BlocksDemoted,
    BlocksEvicted,
    BlocksShared,
    BlocksStored,
    CacheCleared,
    KvEvent,
    PackedHashes,
    PackedTokens,
    ReplicaId,
    Tier,
    namespace_of,
    pack_tokens,
)
from preble.engines.kv_events.wire import WireCleared, WireEvent, WireRemoved, WireStored
from preble.engines.media_marks import mark_of, run_start

MAX_BLOCKS = 8_000_000
"""Blocks remembered of one kind; far more than any replica has, so that only a broken stream gets there."""

MAX_SHARED_EARLY = 100_000
"""Blocks in a store of which it may not have been announced yet what they hold."""

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


class KvTranslation:
    """Turns the events of one replica into what the scheduler hears. O(1) per block.

    `past_is_cut`: the stream did not begin with the engine's first event, so the parents of blocks may be unknown.
    """

    def __init__(self, replica_id: ReplicaId, *, reset_keeps_host: bool = True) -> None:
        """`reset_keeps_host`: whether a reset of the engine's cache leaves what it has put into its host's memory."""
        self.past_is_cut = False
        self._replica_id = replica_id
        self._reset_keeps_host = reset_keeps_host
        self._on_host: dict[BlockHash, bool] = {}
        """Whether the block is there only, for the last that the engine said of its own memory."""
        self._shared_early: dict[BlockHash, None] = {}
        """Put into the store, perhaps before it was announced what they hold; the oldest first."""
        self._unmatchable: set[BlockHash] = set()
        """Blocks that no client's prompt can be compared with (prompt embeddings, SGLang's images), and all that follow
        them."""
        self._ignored_groups: set[int | None] = set()

    def clear(self) -> CacheCleared:
        """Forget every block."""
        for table in (self._on_host, self._shared_early, self._unmatchable, self._ignored_groups):
            table.clear()
        return CacheCleared(self._replica_id)

    def apply(self, event: WireEvent) -> Sequence[KvEvent]:
        """Take note of an event. Returns what the scheduler hears of it."""
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
        hashes, parent = _kept(event.block_hashes), event.parent_block_hash
        namespace, usable = self._namespace(event)
        tokens = _packed(event, usable * event.block_size)
        usable = len(tokens) // TOKEN_BYTES // event.block_size
        if usable < len(hashes) and len(self._unmatchable) < MAX_BLOCKS:
            self._unmatchable.update(hashes[usable:])
        named = hashes if usable == len(hashes) else tuple(hashes[:usable])
        if not named:
            return ()
        cut = self.past_is_cut
        stored = BlocksStored(self._replica_id, named, parent, tokens, event.block_size, namespace, cut)
        return stored, *self._now_elsewhere(named)

    def _now_elsewhere(self, stored: Sequence[BlockHash]) -> Sequence[KvEvent]:
        """Return what was announced of these blocks before they were stored in the engine's memory."""
        if self._on_host:
            self._on_host.update(dict.fromkeys((block for block in stored if block in self._on_host), False))
        if not self._shared_early:
            return ()
        shared = tuple(block for block in stored if block in self._shared_early)
        for block in shared:
            del self._shared_early[block]
        return [BlocksShared(self._replica_id, shared)] if shared else ()

    def _put_on_host(self, event: WireStored) -> Sequence[KvEvent]:
        if event.kv_cache_spec_kind not in _PARTIAL_KINDS and len(self._on_host) < MAX_BLOCKS:
            for block in event.block_hashes:
                self._on_host.setdefault(block, False)
        return ()

    def _put_into_store(self, blocks: Sequence[BlockHash]) -> Sequence[KvEvent]:
        shared = self._matchable(blocks)
        self._shared_early |= dict.fromkeys(shared)
        if len(self._shared_early) > MAX_SHARED_EARLY:
            self._shared_early = dict.fromkeys(list(self._shared_early)[-MAX_SHARED_EARLY // 2 :])
        return [BlocksShared(self._replica_id, shared)] if shared else ()

    def _removed(self, event: WireRemoved) -> Sequence[KvEvent]:
        if event.group_idx in self._ignored_groups or event.medium in _STORE_MEDIA:
            return ()
        if event.medium in _HOST_MEDIA:
            gone = tuple(block for block in event.block_hashes if self._on_host.pop(block, False))
            return [BlocksEvicted(self._replica_id, gone, Tier.HOST)] if gone else ()
        if not event.is_on_device:
            return ()  # what was stored there was not told either
        blocks = self._matchable(event.block_hashes)
        if len(blocks) < len(event.block_hashes):
            self._unmatchable.difference_update(event.block_hashes)
        if blocks and not self._on_host:
            return [BlocksEvicted(self._replica_id, blocks)]
        return [self._left(on_host, tuple(run)) for on_host, run in groupby(blocks, key=self._on_host.__contains__)]

    def _left(self, on_host: bool, blocks: tuple[BlockHash, ...]) -> KvEvent:
        """Return what the scheduler hears of blocks that have left the engine's memory."""
        if not on_host:
            return BlocksEvicted(self._replica_id, blocks)
        self._on_host |= dict.fromkeys(blocks, True)
        return BlocksDemoted(self._replica_id, blocks, Tier.HOST)

    def _matchable(self, blocks: Iterable[BlockHash]) -> BlockHashes:
        if not self._unmatchable:
            return _kept(blocks)
        return tuple(block for block in blocks if block not in self._unmatchable)

    def _engine_cleared(self) -> Sequence[KvEvent]:
        """Translate that the engine's memory is empty, which does not say that its host's is."""
        if not self._reset_keeps_host or not self._on_host:
            return [self.clear()]
        in_both = self._matchable((block for block, there_only in self._on_host.items() if not there_only))
        self._on_host = dict.fromkeys(self._on_host, True)
        demoted = [BlocksDemoted(self._replica_id, in_both, Tier.HOST)] if in_both else []
        return [*demoted, CacheCleared(self._replica_id, engine_only=True)]

    def _is_ours(self, event: WireStored) -> bool:
        """Return whether it is about the cache that decides hits: in GPU memory, kept for whole prompts."""
        if not event.is_on_device:
            return False
        if event.kv_cache_spec_kind in _PARTIAL_KINDS:
            self._ignored_groups.add(event.group_idx)
            return False
        return True

    def _namespace(self, event: WireStored) -> tuple[str, int]:
        """Return the namespace of these blocks, and how many of them can be compared with a prompt if their tokens can.

        Only a prompt's first block names its cache salt; later ones have it from their parent, as the scheduler knows.
        """
        if event.parent_block_hash in self._unmatchable:
            return "", 0
        salt, usable = event.cache_salt, len(event.block_hashes)
        if _has_extra_keys(event):
            foreign = [self._foreign_keys(event, i) for i in range(len(event.block_hashes))]
            if event.parent_block_hash is None and len(foreign[0]) == 1 and isinstance(foreign[0][0], str):
                [salt] = foreign[0]
                foreign[0] = []
            usable = len(list(takewhile(lambda keys: not keys, foreign)))
        return namespace_of(event.lora_name, salt if isinstance(salt, str) else None), usable

    @staticmethod
    def _foreign_keys(event: WireStored, block: int) -> list[object]:
        """Return what block number `block` was hashed with, apart from tokens, media and the adapter's name."""
        keys = [key for key in _extra_keys(event, block) if _as_medium(key) is None]
        return keys[1:] if keys and event.lora_name and keys[0] == event.lora_name else keys


def _has_extra_keys(event: WireStored) -> bool:
    """Return whether any of its blocks has some: vLLM sends a list of nothing for each event."""
    return event.extra_keys is not None and any(event.extra_keys)


def _extra_keys(event: WireStored, block: int) -> Sequence[object]:
    return (event.extra_keys[block] if event.extra_keys else None) or ()


def _as_medium(key: object) -> tuple[str, int] | None:
    """Return the identifier of an image, video or sound, and where it begins relative to the block; None for another
    key.
    """
    match key:
        case [str(identifier), int(offset)]:
            return identifier, offset
    return None


def _kept(blocks: Iterable[BlockHash]) -> BlockHashes:
    return blocks if isinstance(blocks, PackedHashes) else tuple(blocks)


def _marked(event: WireStored, token_ids: list[int]) -> list[int]:
    """Return its token ids, with a mark where an image, video or sound begins."""
    if not _has_extra_keys(event):
        return token_ids
    marked = token_ids.copy()
    for block in range(len(event.block_hashes)):
        for medium in filter(None, map(_as_medium, _extra_keys(event, block))):
            identifier, offset = medium
            if 0 <= offset < event.block_size:
                marked[run_start(token_ids, block * event.block_size + offset)] = mark_of(identifier)
    return marked


def _packed(event: WireStored, count: int) -> PackedTokens:
    """Return the first `count` of its token ids, up to the first block with one that is a hash."""
    if isinstance(event.token_ids, bytes):
        return PackedTokens(event.token_ids[: count * TOKEN_BYTES])
    token_ids, block_size = _marked(event, event.token_ids), event.block_size
    try:
        return pack_tokens(token_ids[:count])
    except OverflowError:
        narrow = next(i for i, token_id in enumerate(token_ids) if token_id >= 2**32)
        return pack_tokens(token_ids[: narrow // block_size * block_size])
