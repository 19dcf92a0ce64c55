"""Cuts long prompts into pieces and keeps the token ids of pieces that prompts share: a known beginning is neither
decoded nor tokenized.

A text is cut between two words about every `PIECE_SIZE` characters or bytes, counted from the cut before; pieces far
from the beginning are larger. So prompts with the same beginning have the same pieces up to where they differ. `joints`
says for which tokenizers the ids of the pieces are the ids of the whole.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from preble.core.types import PackedTokens

PIECE_SIZE = 4096
_LARGEST = 4 * PIECE_SIZE
_OF_BEGINNING = 16
"""A piece has one part in this many of what is before it, but no less than `PIECE_SIZE` and no more than `_LARGEST`."""
_WINDOW = 4 * PIECE_SIZE
"""How far one step searches for a cut."""
_LARGEST_KEPT = 16 * PIECE_SIZE
_STEP = 16 * PIECE_SIZE
"""How much of a text is cut in one go: about 0.05 ms of work."""
_MOST_BEGUN = 256 * PIECE_SIZE
"""How much of a text is compared before the rest is decoded: about 0.1 ms of work."""
MOST_AT_ONCE = 5 * PIECE_SIZE
"""New pieces that follow one another are one part, up to this size: tokenizing it takes about 0.1 ms."""
_ENTRY_BYTES = 250
"""The bytes that a remembered piece takes besides its text and its ids."""
_SEEN_BYTES = 100
"""The bytes that a hash takes in a set."""

TEXT_CUT = re.compile(r" (?<=[A-Za-z]{2} )[A-Za-z]")
"""Before the space between an ASCII letter and another."""
_JSON_CUT = re.compile(rb" (?<=[^\\]{4}[A-Za-z]{2} )[A-Za-z]")
"""The same in a JSON string. The letter before the space ends no escape: the longest escape has six bytes."""
_OVERLAP = 8
_KEY_SIZE = 256


Part = tuple[str | bytes, PackedTokens | None, bool]
"""A part of a text: one piece, or several that are new; its ids, None if they are not known; and whether it is shared:
one piece that an earlier text had, too, so that its ids are worth keeping."""


class _Kept:
    """A piece and its ids. `follower`: the key of the piece that came after it last, 0 for none."""

    __slots__ = ("follower", "ids", "key", "text")

    def __init__(self, key: int, text: str | bytes, ids: PackedTokens) -> None:
        self.key = key
        self.text: Any = text
        self.ids = ids
        self.follower = 0

    @property
    def num_bytes(self) -> int:
        return sys.getsizeof(self.text) + len(self.ids) + _ENTRY_BYTES


class PieceMemory:
    """Token ids of the pieces that more than one text had, the least recently used forgotten first.

    Of a piece that came once only its key is kept: the end of most prompts never comes again. Never takes more than
    `budget_bytes` by its own count.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._most_seen = budget_bytes // (16 * _SEEN_BYTES)
        self._half_bytes = (budget_bytes - 2 * self._most_seen * _SEEN_BYTES) // 2
        self._young: dict[int, _Kept] = {}
        self._old: dict[int, _Kept] = {}
        self._young_bytes = 0
        self._seen: set[int] = set()
        self._seen_before: set[int] = set()

    def get(self, key: int, text: Any, at: int, cuts: Any) -> _Kept | None:
        """Return the piece with this key, None if it is not known (any more) or does not stand here, up to a cut."""
        kept = self._young.get(key)
        if kept is None and (kept := self._old.pop(key, None)) is not None:
            self._keep(kept)
        if kept is None or type(kept.text) is not type(text) or not text.startswith(kept.text, at):
            return None
        return kept if cuts.match(text, at + len(kept.text)) else None

    def put(self, piece: str | bytes, ids: PackedTokens) -> None:
        """Remember a piece, if it is not very long."""
        kept = _Kept(key_of(piece, 0, len(piece)), piece, ids)
        if len(piece) <= _LARGEST_KEPT and kept.num_bytes <= self._half_bytes:
            self._keep(kept)

    def _keep(self, kept: _Kept) -> None:
        """Keep two generations: the older one goes when the younger is full."""
        if (other := self._young.pop(kept.key, None)) is not None:
            self._young_bytes -= other.num_bytes
        if self._young_bytes + kept.num_bytes > self._half_bytes:
            self._old, self._young, self._young_bytes = self._young, {}, 0
        self._young[kept.key] = kept
        self._young_bytes += kept.num_bytes

    def was_seen(self, key: int) -> bool:
        """Return whether the piece was here before; note that it was here."""
        if key in self._seen or key in self._seen_before:
            return True
        if len(self._seen) >= self._most_seen:
            self._seen_before, self._seen = self._seen, set()
        self._seen.add(key)
        return False


def key_of(text: str | bytes, at: int, stop: int) -> int:
    """Return the key of a piece: of its length and the hash of its end, since hashing all of it costs ten times that.
    Of pieces with the same key one is remembered."""
    key = hash(text[max(at, stop - _KEY_SIZE) : stop]) + stop - at
    return ~key if isinstance(text, str) else key  # equal letters of the two types have the same hash


class Parts:
    """The parts of a text (`str`), or of the inside of a JSON string in UTF-8 (`bytes`), from `start` to `end`.

    `is_over`: `step` has returned all of them. `drop_space`: leave out the space at each cut that a part begins at.
    `end`: where the text ends; `begin` needs no more than a place behind it.
    """

    def __init__(self, memory: PieceMemory, text: Any, start: int, end: int, *, drop_space: bool = False) -> None:
        self.is_over = False
        self._memory = memory
        self._text = text
        self._cuts: Any = TEXT_CUT if isinstance(text, str) else _JSON_CUT
        self._start = start
        self.end = end
        self._space = int(drop_space)
        self._at = start
        """Where the piece begins."""
        self._new = start
        """Where the new pieces before it begin."""
        self._seek = start + PIECE_SIZE
        """From where on its end is searched for."""
        self._last: _Kept | None = None
        """The piece before it, if that was known."""
        self._found: list[Part] = []

    def begin(self) -> int:
        """Take the known pieces at the beginning, for `step` to return. Return where they end. O(`_MOST_BEGUN`)."""
        until = min(self._at + _MOST_BEGUN, self.end)
        while self._at < until and (self._follow(until) or self._cut_next(takes_new=False)):
            pass
        return self._at

    def step(self) -> list[Part]:
        """Return the next parts. O(`_STEP`). The caller puts the ids of shared ones."""
        until = min(self._seek + _STEP, self.end - _OVERLAP)
        while self._seek < until:
            if not self._follow(until):
                self._cut_next()
        if self._seek >= self.end - _OVERLAP:
            self.is_over = True
            if self.end - self._new > MOST_AT_ONCE:
                self._end_new()
            self._found.append((self._text[self._new : self.end], None, False))
        found, self._found = self._found, []
        return found

    def _follow(self, until: int) -> bool:
        """Take the known pieces that come next here as they did last time. Return whether there is any."""
        get, text, cuts, found = self._memory.get, self._text, self._cuts, self._found
        at, last = self._at, self._last
        while last is not None and at < until and (kept := get(last.follower, text, at, cuts)) is not None:
            found.append((kept.text, kept.ids, False))
            at += len(kept.text) + self._space
            last = kept
        if at == self._at:
            return False
        self._begin(at)
        self._new, self._last = at, last
        return True

    def _cut_next(self, *, takes_new: bool = True) -> bool:
        """Take the next piece if it is known; if `takes_new`, in any case. Return whether it is known."""
        text, at = self._text, self._at
        cut = self._cuts.search(text, self._seek, self._seek + _WINDOW)
        if cut is None:
            self._seek += _WINDOW - _OVERLAP if takes_new else 0
            return False
        stop: int = cut.start()
        key = key_of(text, at, stop)
        kept = self._memory.get(key, text, at, self._cuts)
        if kept is not None:
            if self._last is not None:
                self._last.follower = key
            self._apart((kept.text, kept.ids, False), stop)
        elif takes_new:
            self._take_new(key, stop)
        else:
            return False
        self._last = kept
        return kept is not None

    def _take_new(self, key: int, stop: int) -> None:
        if self._memory.was_seen(key):
            self._apart((self._text[self._at : stop], None, True), stop)
            return
        if stop - self._new > MOST_AT_ONCE:
            self._end_new()
        self._begin(stop + self._space)

    def _apart(self, part: Part, stop: int) -> None:
        self._end_new()
        self._found.append(part)
        self._begin(stop + self._space)
        self._new = self._at

    def _end_new(self) -> None:
        """End the part of new pieces, if there are any."""
        if self._new < self._at:
            self._found.append((self._text[self._new : self._at - self._space], None, False))
            self._new = self._at

    def _begin(self, at: int) -> None:
        """A piece begins here."""
        self._at = at
        self._seek = at + min(max(PIECE_SIZE, (at - self._start) // _OF_BEGINNING), _LARGEST)
