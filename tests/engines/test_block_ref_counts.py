"""Copies of blocks in the engine's memory, its host's memory and a store: what the scheduler hears of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from preble.core.types import (
    BlocksDemoted,
    BlocksEvicted,
    BlocksShared,
    BlocksStored,
    CacheCleared,
    KvEvent,
    ReplicaId,
    Tier,
)
from preble.engines.block_ref_counts import BlockRefCounts
from preble.engines.kv_wire import decode_batch
from support.kv_publisher import cleared, removed, stored

REPLICA = ReplicaId("r0")


def short(medium: str, *blocks: int) -> dict[str, Any]:
    """Copies as vLLM announces them unless it is asked for more: by hash alone."""
    return stored(*blocks, medium=medium) | {"token_ids": [], "block_size": 0}


def told(counts: BlockRefCounts, *events: dict[str, Any]) -> list[KvEvent]:
    """What the scheduler hears of these events."""

    def unreadable(bad: ValueError) -> None:
        raise AssertionError(bad)

    wire = decode_batch(msgspec.msgpack.encode([1.0, list(events)]), unreadable)
    return [change for event in wire for change in counts.apply(event)]


def kinds(events: Iterable[KvEvent]) -> list[type]:
    return [type(event) for event in events]


@pytest.mark.parametrize(
    "copied",
    [[short("CPU", 2), short("CPU", 1)], [stored(1, 2, medium="CPU_PINNED")]],
    ids=["vllm, child before parent", "sglang, whole"],
)
@pytest.mark.parametrize("is_early", [True, False], ids=["before the engine's", "after the engine's"])
def test_a_block_stays_until_its_copy_in_host_memory_is_gone_too(copied: list[dict[str, Any]], is_early: bool) -> None:
    counts, medium = BlockRefCounts(REPLICA), copied[0]["medium"]
    events = [*copied, stored(1, 2)] if is_early else [stored(1, 2), *copied]
    assert kinds(told(counts, *events)) == [BlocksStored]
    assert told(counts, removed(2)) == [BlocksDemoted(REPLICA, (2,), Tier.HOST)]
    assert told(counts, removed(2, medium=medium)) == [BlocksEvicted(REPLICA, (2,), Tier.HOST)]
    assert told(counts, removed(1, medium=medium)) == []
    assert told(counts, removed(1)) == [BlocksEvicted(REPLICA, (1,))]
    assert len(counts) == 0


def test_a_block_that_comes_back_from_host_memory_is_told_again() -> None:
    counts = BlockRefCounts(REPLICA)
    first = told(counts, stored(1), short("CPU", 1))
    told(counts, removed(1))
    assert told(counts, stored(1)) == first
    assert told(counts, stored(1)) == [], "a second copy is no news"
    assert told(counts, removed(1)) == []
    assert kinds(told(counts, removed(1))) == [BlocksDemoted]


def test_a_reset_leaves_what_is_on_the_host_and_forgets_the_rest() -> None:
    counts = BlockRefCounts(REPLICA)
    told(counts, stored(1, 2, 3), short("CPU", 2), short("CPU", 1), removed(2))
    cleared_engine = CacheCleared(REPLICA, engine_only=True)
    assert told(counts, cleared()) == [BlocksDemoted(REPLICA, (1,), Tier.HOST), cleared_engine]
    assert kinds(told(counts, stored(1, 2))) == [BlocksStored]
    assert len(counts) == 2
    assert told(counts, removed(3)) == []


def test_a_reset_empties_the_host_too_where_the_engine_does_that() -> None:
    counts = BlockRefCounts(REPLICA, reset_keeps_host=False)
    told(counts, stored(1), short("CPU_PINNED", 1))
    assert told(counts, cleared()) == [CacheCleared(REPLICA)]
    assert told(counts, stored(1), removed(1))[1:] == [BlocksEvicted(REPLICA, (1,))]


@pytest.mark.parametrize("medium", ["STORAGE", "DISK", "EXTERNAL"])
def test_what_is_put_into_a_store_is_shared_once_its_tokens_are_known(medium: str) -> None:
    counts = BlockRefCounts(REPLICA)
    assert told(counts, short(medium, 2)) == []
    stored_both, shared_early = told(counts, stored(1, 2))
    assert isinstance(stored_both, BlocksStored)
    assert shared_early == BlocksShared(REPLICA, (2,))
    assert told(counts, short(medium, 1)) == [BlocksShared(REPLICA, (1,))]
    assert told(counts, removed(1, 2, medium=medium)) == [], "whoever removes it there, others may still load it"
    assert told(counts, removed(1)) == [BlocksEvicted(REPLICA, (1,))]


def test_copies_of_blocks_that_no_prompt_can_name_are_not_told() -> None:
    counts = BlockRefCounts(REPLICA)
    events = [stored(1, extra_keys=[[b"embedding"]]), short("CPU", 1), short("STORAGE", 1), removed(1)]
    assert told(counts, *events, removed(1, medium="CPU")) == []
