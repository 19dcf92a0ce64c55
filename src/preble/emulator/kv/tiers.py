"""Where an emulated replica keeps copies of KV blocks: its host's memory, and a folder that replicas share.

Written when a block is computed, as vLLM does it, so that nothing moves when the engine's own memory is full. Nobody
announces what is removed from the folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from preble.core.types import BlockHash, BlocksStored, KvEvent, Tier

Change = tuple[Tier, Sequence[BlockHash], bool]
"""Where, which blocks, and whether they were put there; else they are removed."""


class EmulatedTiers:
    """What is kept. `host_blocks`: at most on the host, 0 for none. `store`: the folder, None for none."""

    def __init__(self, host_blocks: int, store: Path | None) -> None:
        self._host_blocks = host_blocks
        self._host: dict[BlockHash, None] = {}
        self._store = store

    def __contains__(self, block: object) -> bool:
        return isinstance(block, int) and self.tier_of(block) is not None

    def tier_of(self, block: BlockHash) -> Tier | None:
        """Return the fastest tier that has it."""
        if block in self._host:
            return Tier.HOST
        return Tier.STORE if self._store is not None and self._file(self._store, block).exists() else None

    @staticmethod
    def _file(store: Path, block: BlockHash) -> Path:
        return store / repr(block)

    def follow(self, events: Iterable[KvEvent]) -> list[Change]:
        """Keep what was stored in the engine's memory; returns what changed here."""
        changes: list[Change] = []
        for event in events:
            if isinstance(event, BlocksStored):
                changes += [*self._put_on_host(event.block_hashes), *self._put_into_store(event.block_hashes)]
        return changes

    def _put_on_host(self, blocks: Sequence[BlockHash]) -> list[Change]:
        new = [block for block in blocks if block not in self._host] if self._host_blocks else []
        for block in blocks if self._host_blocks else ():
            self._host.pop(block, None)
            self._host[block] = None
        old = list(self._host)[: max(0, len(self._host) - self._host_blocks)]
        for block in old:
            del self._host[block]
        kept = [block for block in reversed(new) if block in self._host]  # children first: any order is allowed
        changes: list[Change] = [(Tier.HOST, [block], True) for block in kept]
        return [*changes, (Tier.HOST, old, False)] if old else changes

    def _put_into_store(self, blocks: Sequence[BlockHash]) -> list[Change]:
        if self._store is None:
            return []
        new = [block for block in blocks if not self._file(self._store, block).exists()]
        for block in new:
            self._file(self._store, block).touch()
        return [(Tier.STORE, [block], True) for block in reversed(new)]
