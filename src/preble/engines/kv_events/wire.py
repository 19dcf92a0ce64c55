"""KV events as vLLM and SGLang put them on the wire: msgpack, each event a map with a "type" or an array tagged first.

Strict about the shape of what we use, indifferent to anything else: engines add fields and kinds of events freely.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from preble.core.types import BlockHash, PackedHashes, PackedTokens

TokenId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Wider than a model's: SGLang puts hashes in the place of images."""

if TYPE_CHECKING:
    Hashes = list[BlockHash] | PackedHashes
    TokenIds = list[int] | PackedTokens
else:  # msgspec makes lists, `packed` the other
    Hashes = list[BlockHash]
    TokenIds = list[TokenId]


def _is_on_device(medium: str | None) -> bool:
    """Return whether it is the engine's own memory, which events need not name."""
    return medium in (None, "GPU")


_MAP_TYPES = (*range(0x80, 0x90), 0xDE, 0xDF)


class WireStored(Struct, tag="BlockStored", tag_field="type"):
    """Blocks that follow one another are cached now.

    What their hashes cover beside tokens: `extra_keys`, per block (vLLM), or `cache_salt` (SGLang).
    """

    block_hashes: Hashes
    parent_block_hash: BlockHash | None
    token_ids: TokenIds
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: Any = None

    @property
    def is_on_device(self) -> bool:
        return _is_on_device(self.medium)


class WireRemoved(Struct, tag="BlockRemoved", tag_field="type"):
    """One copy of each of these blocks is gone."""

    block_hashes: Hashes
    medium: str | None = None
    group_idx: int | None = None

    @property
    def is_on_device(self) -> bool:
        return _is_on_device(self.medium)

    def has_joined(self, other: WireRemoved) -> bool:
        """Take in the blocks of another removal; False if it is of another kind."""
        if self.medium != other.medium or self.group_idx != other.group_idx or not isinstance(self.block_hashes, list):
            return False
        self.block_hashes += other.block_hashes
        return True


class WireCleared(Struct, tag="AllBlocksCleared", tag_field="type"):
    """The whole cache is gone."""


class _ArrayStored(WireStored, array_like=True, tag="BlockStored"):
    pass


class _ArrayRemoved(WireRemoved, array_like=True, tag="BlockRemoved"):
    pass


class _ArrayCleared(WireCleared, array_like=True, tag="AllBlocksCleared"):
    pass


class _Batch(Struct, array_like=True):
    ts: float
    events: list[Raw]


class _MapBatch(Struct, array_like=True):
    ts: float
    events: list[WireStored | WireRemoved | WireCleared]


class _MapHead(Struct):
    type: str


WireEvent = WireStored | WireRemoved | WireCleared
KNOWN_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


class Malformed(ValueError):
    """A payload, or one event in it, that does not have the documented shape."""


class UnknownEvent(ValueError):
    """A kind of event that this version does not know; its name is the only argument."""


_map_batches = msgspec.msgpack.Decoder(_MapBatch)
_batches = msgspec.msgpack.Decoder(_Batch)
_maps = msgspec.msgpack.Decoder(WireStored | WireRemoved | WireCleared)
_arrays = msgspec.msgpack.Decoder(_ArrayStored | _ArrayRemoved | _ArrayCleared)
_map_heads = msgspec.msgpack.Decoder(_MapHead)
_any_arrays = msgspec.msgpack.Decoder(list[Any])


_PAUSE_S = 50e-6
"""Between two parts of a message that a thread decodes. Without it the event loop would wait for the interpreter's lock
for the whole message."""

_PART_BYTES = 8 * 1024
"""Decoded between two pauses. vLLM sends an event for each block that it removes, and a pause after each of them would
cost more than decoding it."""

_decoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-events")


async def decode_large(payload: bytes, on_bad: Callable[[Malformed | UnknownEvent], None]) -> Sequence[WireEvent]:
    """Do as `decode_batch`, for a message that takes so long that other tasks should go on meanwhile: in a thread."""
    bad: list[Malformed | UnknownEvent] = []
    loop = asyncio.get_running_loop()
    events = await loop.run_in_executor(_decoder, partial(_decode_one_by_one, payload, bad.append, pauses=True))
    for each in bad:
        on_bad(each)
    return _in_runs(events)


def decode_batch(payload: bytes, on_bad: Callable[[Malformed | UnknownEvent], None]) -> Sequence[WireEvent]:
    """Return the events of one message, without those that cannot be read: `on_bad` is called with each of them.

    Removals that follow one another and are alike are one event: vLLM sends one for each block.
    """
    try:
        # What vLLM sends in practice, in one go; five times faster than event by event.
        events = _map_batches.decode(payload).events
        for event in events:
            _check(event)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, Malformed):
        events = _decode_one_by_one(payload, on_bad)
    return _in_runs(events)


def _in_runs(events: Sequence[WireEvent]) -> Sequence[WireEvent]:
    if len(events) < 2:
        return events
    runs: list[WireEvent] = []
    for event in events:
        last = runs[-1] if runs else None
        if not (isinstance(event, WireRemoved) and isinstance(last, WireRemoved) and last.has_joined(event)):
            runs.append(event)
    return runs


def _decode_one_by_one(
    payload: bytes, on_bad: Callable[[Malformed | UnknownEvent], None], *, pauses: bool = False
) -> list[WireEvent]:
    try:
        raws = _batches.decode(payload).events
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        on_bad(Malformed(f"not a batch of events: {error}"))
        return []
    events: list[WireEvent] = []
    since_pause = 0
    for raw in raws:
        content = bytes(raw)
        try:
            events.append(_decode_event(content))
        except (Malformed, UnknownEvent) as bad:
            on_bad(bad)
        since_pause += len(content)
        if pauses and since_pause > _PART_BYTES:
            time.sleep(_PAUSE_S)
            since_pause = 0
    return events


def _decode_event(content: bytes) -> WireEvent:
    """Raises: UnknownEvent, Malformed."""
    is_map = content[:1] != b"" and content[0] in _MAP_TYPES
    try:
        event: WireEvent = _maps.decode(content) if is_map else _arrays.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        name = _type_name(content, is_map)
        if name is not None and name not in KNOWN_TYPES:
            raise UnknownEvent(name) from error
        raise Malformed(f"{name or 'an event'}: {error}") from error
    if isinstance(event, _ArrayStored):
        event.cache_salt = None  # only maps have it; an array has something of another version's in its place
    _check(event)
    return event


def _type_name(content: bytes, is_map: bool) -> str | None:
    try:
        name = _map_heads.decode(content).type if is_map else _any_arrays.decode(content)[0]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError):
        return None
    return name if isinstance(name, str) else None


def _check(event: WireEvent) -> None:
    """Raises: Malformed: its parts do not fit one another."""
    if not isinstance(event, WireStored):
        return
    blocks = len(event.block_hashes)
    if not event.is_on_device and not event.token_ids:
        return  # vLLM names blocks that it has copied elsewhere by their hashes alone
    if event.block_size < 1 or len(event.token_ids) != blocks * event.block_size:
        raise Malformed(
            f"BlockStored: {blocks} blocks of {event.block_size} tokens came with {len(event.token_ids)} token ids"
        )
    if event.extra_keys is not None and len(event.extra_keys) != blocks:
        raise Malformed(f"BlockStored: {blocks} blocks came with {len(event.extra_keys)} extra keys")
