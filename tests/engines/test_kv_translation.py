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
from preble.engines.kv_events.translation import MAX_SHARED_EARLY, KvTranslation
from preble.engines.kv_events.wire import decode_batch
from support.kv_publisher import cleared, removed, stored

REPLICA = ReplicaId("r0")


def short(medium: str, *blocks: int) -> dict[str, Any]:
    """Copies as vLLM announces them unless it is asked for more: by hash alone."""
    return stored(*blocks, medium=medium) | {"token_ids": [], "block_size": 0}


def told(translation: KvTranslation, *events: dict[str, Any]) -> list[KvEvent]:
    """What the scheduler hears of these events."""

    def unreadable(bad: ValueError) -> None:
        raise AssertionError(bad)

    wire = decode_batch(msgspec.msgpack.encode([1.0, list(events)]), unreadable)
    return [change for event in wire for change in translation.apply(event)]


def kinds(events: Iterable[KvEvent]) -> list[type]:
    return [type(event) for event in events]


@pytest.mark.parametrize(
    "copied",
    [[short("CPU", 2), short("CPU", 1)], [stored(1, 2, medium="CPU_PINNED")]],
    ids=["vllm, child before parent", "sglang, whole"],
)
@pytest.mark.parametrize("is_early", [True, False], ids=["before the engine's", "after the engine's"])
def test_a_block_stays_until_its_copy_in_host_memory_is_gone_too(copied: list[dict[str, Any]], is_early: bool) -> None:
    translation, medium = KvTranslation(REPLICA), copied[0]["medium"]
    events = [*copied, stored(1, 2)] if is_early else [stored(1, 2), *copied]
    assert kinds(told(translation, *events)) == [BlocksStored]
    assert told(translation, removed(2)) == [BlocksDemoted(REPLICA, (2,), Tier.HOST)]
    assert told(translation, removed(2, medium=medium)) == [BlocksEvicted(REPLICA, (2,), Tier.HOST)]
    assert told(translation, removed(1, medium=medium)) == []
    assert told(translation, removed(1)) == [BlocksEvicted(REPLICA, (1,))]


def test_a_block_that_comes_back_from_host_memory_is_told_again() -> None:
    translation = KvTranslation(REPLICA)
    first = told(translation, stored(1), short("CPU", 1))
    told(translation, removed(1))
    assert told(translation, stored(1)) == first
    assert told(translation, removed(1, medium="CPU"), removed(1)) == [BlocksEvicted(REPLICA, (1,))]


def test_every_copy_in_the_engine_s_memory_is_told() -> None:
    """The scheduler counts them, so nothing is kept here of blocks that are nowhere else."""
    translation = KvTranslation(REPLICA)
    assert kinds(told(translation, stored(1, 2), stored(2, parent=1))) == [BlocksStored, BlocksStored]
    assert told(translation, removed(2, 1)) == [BlocksEvicted(REPLICA, (2, 1))]
    assert told(translation, removed(2)) == [BlocksEvicted(REPLICA, (2,))]


def test_a_reset_leaves_what_is_on_the_host_and_forgets_the_rest() -> None:
    translation = KvTranslation(REPLICA)
    told(translation, stored(1, 2, 3), short("CPU", 2), short("CPU", 1), removed(2))
    cleared_engine = CacheCleared(REPLICA, engine_only=True)
    assert told(translation, cleared()) == [BlocksDemoted(REPLICA, (1,), Tier.HOST), cleared_engine]
    assert kinds(told(translation, stored(1, 2))) == [BlocksStored]
    assert told(translation, removed(2)) == [BlocksDemoted(REPLICA, (2,), Tier.HOST)]


def test_a_reset_empties_the_host_too_where_the_engine_does_that() -> None:
    translation = KvTranslation(REPLICA, reset_keeps_host=False)
    told(translation, stored(1), short("CPU_PINNED", 1))
    assert told(translation, cleared()) == [CacheCleared(REPLICA)]
    assert told(translation, stored(1), removed(1))[1:] == [BlocksEvicted(REPLICA, (1,))]


@pytest.mark.parametrize("medium", ["STORAGE", "DISK", "EXTERNAL"])
def test_what_is_put_into_a_store_is_shared_once_its_tokens_are_known(medium: str) -> None:
    translation = KvTranslation(REPLICA)
    shared = BlocksShared(REPLICA, (2,))
    assert told(translation, short(medium, 2)) == [shared]
    stored_both, shared_early = told(translation, stored(1, 2))
    assert isinstance(stored_both, BlocksStored)
    assert shared_early == shared, "nobody knew what it holds when it was told first"
    assert told(translation, short(medium, 1)) == [BlocksShared(REPLICA, (1,))]
    assert told(translation, removed(1, 2, medium=medium)) == [], "whoever removes it there, others may still load it"
    assert told(translation, removed(1)) == [BlocksEvicted(REPLICA, (1,))]


def test_what_is_stored_or_removed_on_an_unknown_medium_is_not_told() -> None:
    translation = KvTranslation(REPLICA)
    told(translation, stored(1, 2))
    assert told(translation, stored(3, medium="TAPE"), short("TAPE", 1), removed(1, 3, medium="TAPE")) == []
    assert told(translation, removed(1, medium=None)) == [BlocksEvicted(REPLICA, (1,))]
    assert told(translation, removed(2)) == [BlocksEvicted(REPLICA, (2,))]


def test_of_the_blocks_in_a_store_only_the_latest_are_remembered() -> None:
    translation, half = KvTranslation(REPLICA), MAX_SHARED_EARLY // 2
    told(translation, short("STORAGE", *range(MAX_SHARED_EARLY + 1)))
    assert kinds(told(translation, stored(half))) == [BlocksStored]
    assert kinds(told(translation, stored(half + 1))) == [BlocksStored, BlocksShared]


def test_copies_of_blocks_that_no_prompt_can_name_are_not_told() -> None:
    translation = KvTranslation(REPLICA)
    events = [stored(1, extra_keys=[[b"embedding"]]), short("CPU", 1), short("STORAGE", 1), removed(1)]
    assert told(translation, *events, removed(1, medium="CPU")) == []
