"""KV events in one pass from their bytes to packed token ids and hashes, where this module is compiled.

`wire` makes a Python object of each token id and each hash, which takes ten times as long. Here a message is read
only if all its events are as vLLM and SGLang nearly always send them: maps, about blocks in the GPU's memory that were
hashed by their tokens alone. `wire` reads everything else and all that is malformed: it alone says what is allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter, read_i64_be, read_i64_le, write_i32_le, write_i64_le

from preble.core.types import HASH_BYTES, TOKEN_BYTES, PackedHashes, PackedTokens
from preble.engines.kv_events.wire import (
    Malformed,
    UnknownEvent,
    WireCleared,
    WireEvent,
    WireRemoved,
    WireStored,
    decode_batch,
)

if TYPE_CHECKING:
    from mypy_extensions import i32, i64

_NIL: Final = 0xC0
_TRUE: Final = 0xC3
_F64: Final = 0xCB
_U8: Final = 0xCC
_U16: Final = 0xCD
_U32: Final = 0xCE
_U64: Final = 0xCF
_I64: Final = 0xD3
_STR8: Final = 0xD9


def is_fast() -> bool:
    """Return whether this is faster than `wire`: compiled, and on a machine whose bytes are in the order that it
    packs.
    """
    return not __file__.endswith(".py") and sys.byteorder == "little"


def decode(payload: bytes, on_bad: Callable[[Malformed | UnknownEvent], None]) -> Sequence[WireEvent]:
    """Do as `decode_batch`; the fastest way that there is."""
    events = packed_events(payload) if is_fast() else None
    return decode_batch(payload, on_bad) if events is None else events


def packed_events(payload: bytes) -> list[WireEvent] | None:
    """Return what `decode_batch` makes of a message, packed; None if anything in it is not as it nearly always is."""
    try:
        return _PackedMessage(payload).events()
    except (_Unusual, IndexError, OverflowError, UnicodeDecodeError):
        return None


class _Unusual(Exception):
    """Something that `wire` has to look at."""


class _PackedMessage:
    """Reads `data` from `at` on; each method goes on behind what it has read.

    Raises, all of them: _Unusual; IndexError: the message ends within; OverflowError; UnicodeDecodeError.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at: i64 = 0
        self.has_negative = False
        self.has_large = False

    def events(self) -> list[WireEvent]:
        parts = self.array()
        if parts < 2 or self.data[self.at] != _F64:
            raise _Unusual
        self.at += 9
        events: list[WireEvent] = []
        left = self.array()
        while left:
            left -= self.add_event(events, left)
        while parts > 2:
            self.skip()
            parts -= 1
        if self.at != len(self.data):
            raise _Unusual
        return events

    def add_event(self, events: list[WireEvent], left: i64) -> i64:
        """Add the next event, or as one all removals alike among the `left` next ones; returns how many it took."""
        start = self.at
        fields = self.length(0x80, 0xDE) - 1
        if fields < 0 or self.raw_text() != b"type":
            raise _Unusual
        kind = self.raw_text()
        if kind == b"BlockRemoved":
            return self.add_removed(events, start, fields, left)
        if kind == b"BlockStored":
            events.append(self.stored(fields))
        elif kind == b"AllBlocksCleared" and not fields:
            events.append(WireCleared())
        else:
            raise _Unusual
        return 1

    def stored(self, fields: i64) -> WireStored:
        hashes: PackedHashes | None = None
        tokens: PackedTokens | None = None
        parent: int | None = None
        group: int | None = None
        lora_id: int | None = None
        medium: str | None = None
        lora_name: str | None = None
        kind: str | None = None
        has_parent = False
        block_size: i64 = 0
        keys: i64 = -1
        while fields:
            fields -= 1
            name = self.raw_text()
            if name == b"block_hashes":
                hashes = self.hashes()
            elif name == b"token_ids":
                tokens = self.token_ids()
            elif name == b"parent_block_hash":
                parent, has_parent = self.hash_or_none(), True
            elif name == b"block_size":
                block_size = self.number()
            elif name == b"medium":
                medium = self.text_or_none()
            elif name == b"extra_keys":
                keys = self.nothings()
            elif name == b"lora_id":
                lora_id = self.number_or_none()
            elif name == b"lora_name":
                lora_name = self.text_or_none()
            elif name == b"group_idx":
                group = self.number_or_none()
            elif name == b"kv_cache_spec_kind":
                kind = self.text_or_none()
            elif name == b"cache_salt":
                self.nothing()
            else:
                self.skip()
        if hashes is None or tokens is None or not has_parent or block_size < 1 or not _is_gpu(medium):
            raise _Unusual
        count: i64 = len(hashes.packed) // HASH_BYTES
        if len(tokens) != count * block_size * TOKEN_BYTES or (keys >= 0 and keys != count):
            raise _Unusual
        return WireStored(hashes, parent, tokens, block_size, lora_id, medium, lora_name, None, group, kind)

    def add_removed(self, events: list[WireEvent], start: i64, fields: i64, left: i64) -> i64:
        """Do as `add_event`, for a removal that begins at `start`, and of which the type has been read.

        vLLM sends one for each block. They differ in the hash alone, so what is before and behind it is only compared.
        """
        out = BytesWriter()
        medium: str | None = None
        group: int | None = None
        first: i64 = -1
        behind: i64 = -1
        self.has_negative = self.has_large = False
        while fields:
            fields -= 1
            name = self.raw_text()
            if name == b"block_hashes" and first < 0:
                count = self.array()
                first = self.at
                self.add_hashes(out, count)
                behind = self.at
            elif name == b"medium":
                medium = self.text_or_none()
            elif name == b"group_idx":
                group = self.number_or_none()
            else:
                raise _Unusual
        if first < 0 or not _is_gpu(medium):
            raise _Unusual
        end = self.at
        taken: i64 = 1
        while taken < left and len(out) == taken * HASH_BYTES:
            next_start = self.at
            if not self.is_like(start, first):
                break
            next_hash = self.hash()
            if not self.is_like(behind, end):
                self.at = next_start
                break
            write_i64_le(out, next_hash)
            taken += 1
        events.append(WireRemoved(self.packed(out), medium, group))
        return taken

    def is_like(self, start: i64, end: i64) -> bool:
        """Return whether the next bytes are those from `start` to `end`; if so they count as read."""
        data, at = self.data, self.at
        if at + end - start > len(data):
            return False
        while start + 8 <= end:
            if read_i64_le(data, start) != read_i64_le(data, at):
                return False
            start += 8
            at += 8
        while start < end:
            if data[start] != data[at]:
                return False
            start += 1
            at += 1
        self.at = at
        return True

    def hashes(self) -> PackedHashes:
        self.has_negative = self.has_large = False
        out = BytesWriter()
        self.add_hashes(out, self.array())
        return self.packed(out)

    def packed(self, out: BytesWriter) -> PackedHashes:
        if self.has_negative and self.has_large:
            raise _Unusual
        return PackedHashes(out.getvalue(), self.has_negative)

    def add_hashes(self, out: BytesWriter, count: i64) -> None:
        while count:
            write_i64_le(out, self.hash())
            count -= 1

    def hash(self) -> i64:
        """Return its 64 bits. Notes whether the integer is negative, or too large for one with a sign."""
        kind: i64 = self.data[self.at]
        if kind != _U64 and kind != _I64:
            return self.number()
        value = read_i64_be(self.data, self.at + 1)
        self.at += 9
        if value < 0:
            if kind == _U64:
                self.has_large = True
            else:
                self.has_negative = True
        return value

    def hash_or_none(self) -> int | None:
        if self.is_nothing():
            return None
        self.has_large = False
        value: int = self.hash()
        return value + (1 << 64) if self.has_large else value

    def token_ids(self) -> PackedTokens:
        """Read numbers, each of at most 31 bits."""
        count = self.array()
        data, at, out = self.data, self.at, BytesWriter()
        size: i64 = len(data)
        while count:
            kind: i64 = data[at]
            four = kind - _U16
            if 0 <= four <= 1 and at + 9 <= size:
                # Of two bytes or four, without a branch that the processor would guess wrong half of the time.
                wide: int = read_i64_be(data, at + 1) >> (48 - 16 * four) & (0xFFFF - 0x10000 * four)
                at += 3 + 2 * four
            elif kind < 0x80:
                wide = kind
                at += 1
            else:
                self.at = at
                wide = self.number()
                at = self.at
            token: i32 = wide
            write_i32_le(out, token)
            count -= 1
        self.at = at
        return PackedTokens(out.getvalue())

    def number(self) -> i64:
        """Read a number of at most 32 bits, not negative."""
        kind: i64 = self.data[self.at]
        self.at += 1
        if kind < 0x80:
            return kind
        if kind < _U8 or kind > _U32:
            raise _Unusual
        return self.digits(1 << (kind - _U8))

    def digits(self, width: i64) -> i64:
        value: i64 = 0
        digit: i64 = 0
        while width:
            digit = self.data[self.at]
            value = value << 8 | digit
            self.at += 1
            width -= 1
        return value

    def number_or_none(self) -> int | None:
        return None if self.is_nothing() else self.number()

    def is_nothing(self) -> bool:
        if self.data[self.at] != _NIL:
            return False
        self.at += 1
        return True

    def nothing(self) -> None:
        if not self.is_nothing():
            raise _Unusual

    def nothings(self) -> i64:
        """Read an array of nils; return its length, or -1 for nil in place of the array."""
        if self.is_nothing():
            return -1
        count = self.array()
        left = count
        while left:
            self.nothing()
            left -= 1
        return count

    def array(self) -> i64:
        return self.length(0x90, 0xDC)

    def length(self, short: i64, long: i64) -> i64:
        """Read the length of an array or a map, for which these bytes stand."""
        kind: i64 = self.data[self.at]
        self.at += 1
        if kind & 0xF0 == short:
            return kind & 0x0F
        if kind != long and kind != long + 1:
            raise _Unusual
        return self.digits(2 << (kind - long))

    def text_or_none(self) -> str | None:
        return None if self.is_nothing() else self.raw_text().decode()

    def raw_text(self) -> bytes:
        kind: i64 = self.data[self.at]
        self.at += 1
        length = kind & 0x1F
        if kind == _STR8:
            length = self.digits(1)
        elif kind & 0xE0 != 0xA0:
            raise _Unusual
        start = self.at
        self.at += length
        if self.at > len(self.data):
            raise _Unusual
        return self.data[start : self.at]

    def skip(self) -> None:
        """Skip a value that nobody reads: none, a truth value, a number or a text."""
        kind: i64 = self.data[self.at]
        if _NIL <= kind <= _TRUE and kind != 0xC1:
            self.at += 1
        elif kind == _STR8 or kind & 0xE0 == 0xA0:
            self.raw_text()
        else:
            self.number()


def _is_gpu(medium: str | None) -> bool:
    return medium is None or medium == "GPU"
