"""Cuts long prompts into pieces and keeps the pieces' token ids: a known beginning is neither decoded nor tokenized.

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
_ENTRY_BYTES = 200
"""The bytes that a remembered piece takes besides its text and its ids."""

TEXT_CUT = re.compile(r" (?<=[A-Za-z]{2} )[A-Za-z]")
"""Before the space between an ASCII letter and another."""
_JSON_CUT = re.compile(rb" (?<=[^\\]{4}[A-Za-z]{2} )[A-Za-z]")
"""The same in a JSON string. The letter before the space ends no escape: the longest escape has six bytes."""
_OVERLAP = 8


def cut(text: str | bytes, *, drop_space: bool = False) -> Iterator[tuple[str | bytes, bool]]:
    """Yield the pieces of a text, or of the inside of a JSON string in UTF-8, each with whether it ends at a cut.

    A step that finds no cut yields an empty piece, so that the caller can let others have a turn. `drop_space`: leave
    out the space at each cut.
    """
    search: Any = TEXT_CUT.search if isinstance(text, str) else _JSON_CUT.search
    start, at, last = 0, PIECE_SIZE, len(text) - _OVERLAP
    while at < last:
        found = search(text, at, at + _WINDOW)
        if found is None:
            at += _WINDOW - _OVERLAP
            yield text[:0], False
        else:
            yield text[start : found.start()], True
            start = found.start() + drop_space
            at = found.start() + PIECE_SIZE
    yield text[start:], False


class PieceMemory:
    """Token ids of pieces, the least recently used forgotten first. Never takes more than `budget_bytes`, by count."""

    def __init__(self, budget_bytes: int) -> None:
        self._half_bytes = budget_bytes // 2
        self._young: dict[str | bytes, PackedTokens] = {}
        self._old: dict[str | bytes, PackedTokens] = {}
        self._young_bytes = 0

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
