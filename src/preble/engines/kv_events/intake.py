"""What is known of one replica's KV events: numbers and payloads seen, and the changes that messages make."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import groupby, pairwise

import structlog

from preble.core.types import BlocksDemoted, BlocksEvicted, CacheCleared, KvEvent, ReplicaId, Tier
from preble.engines.kv_events.packed import decode, is_fast
from preble.engines.kv_events.sockets import KvMessage
from preble.engines.kv_events.translation import KvTranslation
from preble.engines.kv_events.wire import Malformed, UnknownEvent, WireEvent, decode_large

REMEMBERED_MESSAGES = 16_384
"""Numbers whose payload we can still recognise; more than a publisher keeps by default."""

NOTHING_YET = -1
"""In place of the last number: the engine has published nothing so far."""

SMALL_BYTES = (96 if is_fast() else 32) * 1024
"""A message up to this is decoded and applied at once, in a third of a millisecond. One that stores 8,192 tokens and
evicts as many has 60 to 75 KB."""

LARGE_BYTES = (128 if is_fast() else 80) * 1024
"""A message above this is decoded in a thread. The way there and back costs several times as much as decoding one that
is a little smaller."""

SLICE_S = 0.002
"""How long the messages of one stream are applied before other tasks go on."""


@dataclass(slots=True)
class KvEventCounters:
    """What happened on one stream since it began."""

    messages: int = 0
    duplicates: int = 0
    starts_over: int = 0
    malformed: int = 0
    unknown: int = 0


class MessageOrder(Enum):
    """How a message follows the ones before it."""

    NEXT = auto()
    DUPLICATE = auto()
    GAP = auto()
    OTHER_LIFE = auto()
    """Its number has been used, for another payload: the engine has restarted."""


class Line:
    """The numbers and payloads seen of one life of an engine.

    `last`: the newest number applied; None where any may come next, `NOTHING_YET` where 0 must.
    """

    def __init__(self) -> None:
        self.last: int | None = None
        self._payloads: dict[int, int] = {}

    @property
    def is_empty(self) -> bool:
        return not self._payloads

    def judge(self, message: KvMessage) -> MessageOrder:
        if self.last is None or message.seq == self.last + 1:
            return MessageOrder.NEXT
        if message.seq > self.last:
            return MessageOrder.GAP
        same = self._payloads.get(message.seq) == _mark_of(message.payload)
        return MessageOrder.DUPLICATE if same else MessageOrder.OTHER_LIFE

    def accept(self, message: KvMessage) -> None:
        self.last = message.seq
        self._payloads[message.seq] = _mark_of(message.payload)
        self._payloads.pop(message.seq - REMEMBERED_MESSAGES, None)


def _mark_of(payload: bytes) -> int:
    """Return what to recognise a message by. Another life of the engine has other times at the start, and other hashes
    throughout.
    """
    return hash(payload) if len(payload) <= 1024 else hash((len(payload), payload[:512], payload[-512:]))


class TimeSlice:
    """Lets other tasks go on after every `SLICE_S` of work."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self.begin()

    def begin(self, length_s: float = SLICE_S) -> None:
        """Let a new slice begin now."""
        self._ends_at = self._clock() + length_s

    def is_over(self) -> bool:
        return self._clock() >= self._ends_at

    async def over(self) -> None:
        if self.is_over():
            await asyncio.sleep(0)
            self.begin()


class EventIntake:
    """Messages in, changes of the cache out: what is known of one replica, whichever way a message came."""

    def __init__(self, replica_id: ReplicaId, reset_keeps_host: bool) -> None:
        self.replica_id = replica_id
        self.line = Line()
        self.counters = KvEventCounters()
        self._translation = KvTranslation(replica_id, reset_keeps_host=reset_keeps_host)
        self._said: set[str] = set()
        self._log = structlog.get_logger("preble.engines.kv_events.stream").bind(replica=replica_id)

    def start_over(self, *, is_past: bool = False) -> CacheCleared:
        """Forget everything. `is_past`: the engine will report it again; the blocks are not gone."""
        self.counters.starts_over += 1
        self.line = Line()
        self._translation.past_is_cut = False
        return replace(self._translation.clear(), is_past=is_past)

    def is_small(self, message: KvMessage) -> bool:
        """Return whether the message is soon applied, so that `accept_small` may take it."""
        return len(message.payload) <= SMALL_BYTES

    async def accept(self, message: KvMessage, *, is_past: bool = False) -> Sequence[KvEvent]:
        """Apply the next message. `is_past`: it is replayed, so what it says may have been overtaken since.

        Nothing in it can raise.
        """
        if self.is_small(message):
            return self.accept_small(message, is_past=is_past)
        self._note_start(message)
        changes: list[KvEvent] = []
        if len(message.payload) <= LARGE_BYTES:
            events = decode(message.payload, self._on_bad)
            await asyncio.sleep(0)
        else:
            events = await decode_large(message.payload, self._on_bad)
        time_slice = TimeSlice()
        for event in events:
            changes += self._changes(event, is_past)
            await time_slice.over()
        self._note_end(message)
        return merged(changes)

    def accept_small(self, message: KvMessage, *, is_past: bool = False) -> Sequence[KvEvent]:
        """Do as `accept`, without a pause."""
        self._note_start(message)
        events = decode(message.payload, self._on_bad)
        changes = [change for event in events for change in self._changes(event, is_past)]
        self._note_end(message)
        return merged(changes)

    def _note_start(self, message: KvMessage) -> None:
        if self.line.is_empty and message.seq > 0:
            self._translation.past_is_cut = True
            self.say_once("kv_events_without_their_past", reason="the engine no longer replays the oldest events")

    def _note_end(self, message: KvMessage) -> None:
        self.line.accept(message)
        self.counters.messages += 1

    def _changes(self, event: WireEvent, is_past: bool) -> Sequence[KvEvent]:
        changes = self._translation.apply(event)
        if not is_past:
            return changes
        return [replace(change, is_past=True) if isinstance(change, CacheCleared) else change for change in changes]

    def _on_bad(self, bad: Malformed | UnknownEvent) -> None:
        if isinstance(bad, Malformed):
            self.count_malformed(bad)
            return
        self.counters.unknown += 1
        self.say_once("unknown_kv_event", kind=str(bad)[:80])

    def count_malformed(self, error: Malformed | None = None) -> None:
        self.counters.malformed += 1
        self.say_once("malformed_kv_event", error=str(error or "a message is not [topic, number, payload]")[:300])

    def say_once(self, event: str, **details: object) -> None:
        """Log a warning of this kind once in the life of the stream."""
        if event not in self._said:
            self._said.add(event)
            self._log.warning(event, **details)


def merged(changes: Sequence[KvEvent]) -> Sequence[KvEvent]:
    """Return the same changes, evictions that follow one another as one, and so demotions, as where others were
    ignored.
    """
    if all(type(one) is not type(other) for one, other in pairwise(changes)):
        return changes
    result: list[KvEvent] = []
    for _, run in groupby(changes, key=_kind):
        first, *more = run
        if more and isinstance(first, (BlocksEvicted, BlocksDemoted)):
            blocks = (block for change in (first, *more) for block in getattr(change, "block_hashes", ()))
            result.append(replace(first, block_hashes=tuple(blocks)))
        else:
            result += [first, *more]
    return result


def _kind(change: KvEvent) -> tuple[type[KvEvent], Tier | None]:
    return type(change), change.tier if isinstance(change, (BlocksEvicted, BlocksDemoted)) else None
