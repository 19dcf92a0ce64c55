"""Cuts long prompts into pieces and keeps the token ids of pieces that prompts share: a known beginning is neither
decoded nor tokenized.

A text is cut between two words about every `PIECE_SIZE` characters or bytes, counted from the cut before. So prompts
with the same beginning have the same pieces up to where they differ. `joints` says for which tokenizers the ids of the
pieces are the ids of the whole.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from preble.core.types import PackedTokens

PIECE_SIZE = 4096
_WINDOW = 4 * PIECE_SIZE
"""How far one step searches for a cut."""
_LARGEST_KEPT = 16 * PIECE_SIZE
MOST_AT_ONCE = 5 * PIECE_SIZE
"""New pieces that follow one another are one part, up to this size: tokenizing it takes about 0.1 ms."""
_ENTRY_BYTES = 200
"""The bytes that a remembered piece takes besides its text and its ids."""
_SEEN_BYTES = 100
"""The bytes that a hash takes in a set."""

TEXT_CUT = re.compile(r" (?<=[A-Za-z]{2} )[A-Za-z]")
"""Before the space between an ASCII letter and another."""
_JSON_CUT = re.compile(rb" (?<=[^\\]{4}[A-Za-z]{2} )[A-Za-z]")
"""The same in a JSON string. The letter before the space ends no escape: the longest escape has six bytes."""
_OVERLAP = 8


def cut(text: str | memoryview, *, drop_space: bool = False) -> Iterator[tuple[str | bytes, bool]]:
    """Yield the pieces of a text, or of the inside of a JSON string in UTF-8, each with whether it ends at a cut.

    A step that finds no cut yields an empty piece, so that the caller can let others have a turn. `drop_space`: leave
    out the space at each cut.
    """
    search: Any = TEXT_CUT.search if isinstance(text, str) else _JSON_CUT.search
    taken: Any = str if isinstance(text, str) else bytes
    start, at, last = 0, PIECE_SIZE, len(text) - _OVERLAP
    while at < last:
        found = search(text, at, at + _WINDOW)
        if found is None:
            at += _WINDOW - _OVERLAP
            yield taken(), False
        else:
            end = found.start()
            yield taken(text[start:end]), True
            start = end + drop_space
            at = end + PIECE_SIZE
    yield taken(text[start:]), False


Part = tuple[str | bytes, PackedTokens | None, bool]
"""A part of a text: one piece, or several that are new; its ids, None if they are not known; and whether it is shared:
one piece that an earlier text had, too, so that its ids are worth keeping."""


class PieceMemory:
    """Token ids of the pieces that more than one text had, the least recently used forgotten first.

    Of a piece that came once only its hash is kept: the end of most prompts never comes again. Never takes more than
    `budget_bytes` by its own count.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._most_seen = budget_bytes // (16 * _SEEN_BYTES)
        self._half_bytes = (budget_bytes - 2 * self._most_seen * _SEEN_BYTES) // 2
        self._young: dict[str | bytes, PackedTokens] = {}
        self._old: dict[str | bytes, PackedTokens] = {}
        self._young_bytes = 0
        self._seen: set[int] = set()
        self._seen_before: set[int] = set()

    def parts(self, text: str | memoryview, *, drop_space: bool = False) -> Iterator[Part]:
        """Yield the parts of a text that is cut as `cut` does. The caller puts the ids of shared ones.

        A part may be empty, so that the caller can let others have a turn.
        """
        space: Any = " " if isinstance(text, str) else b" "
        between = space if drop_space else space[:0]
        new: list[Any] = []
        size = 0
        for piece, ends_at_cut in cut(text, drop_space=drop_space):
            ids = self.get(piece) if ends_at_cut else None
            is_shared = ids is None and ends_at_cut and self._was_seen(piece)
            is_apart = ids is not None or is_shared or not piece
            if new and (is_apart or size + len(piece) > MOST_AT_ONCE):
                yield between.join(new), None, False
                new, size = [], 0
            if is_apart:
                yield piece, ids if piece else PackedTokens(b""), is_shared
            else:
                new.append(piece)
                size += len(piece)
        if new:
            yield between.join(new), None, False

    def get(self, piece: str | bytes) -> PackedTokens | None:
        """Return the ids of a piece, None if it is not known (any more)."""
        ids = self._young.get(piece)
        if ids is None and (ids := self._old.pop(piece, None)) is not None:
            self.put(piece, ids)
        return ids

    def put(self, piece: str | bytes, ids: PackedTokens) -> None:
        """Remember a piece, if it is not very long. Two generations: the older one goes when the younger is full."""
        size = sys.getsizeof(piece) + len(ids) + _ENTRY_BYTES
        if len(piece) > _LARGEST_KEPT or size > self._half_bytes or piece in self._young:
            return
        if self._young_bytes + size > self._half_bytes:
            self._old, self._young, self._young_bytes = self._young, {}, 0
        self._young[piece] = ids
        self._young_bytes += size

    def _was_seen(self, piece: str | bytes) -> bool:
        """Return whether the piece was here before; note that it was here."""
        found = hash(piece)
        if found in self._seen or found in self._seen_before:
            return True
        if len(self._seen) >= self._most_seen:
            self._seen_before, self._seen = self._seen, set()
        self._seen.add(found)
        return False
