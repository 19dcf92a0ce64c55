"""Images, videos and sounds for an emulated model: each is as many placeholder tokens as the settings say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from preble.engines.media_marks import mark_of

PLACEHOLDER = 2**31 - 1
STAND_IN = "\uf8fd"
"""Where a medium stands in a chat's text. Not a client's stand-in, which is a text like any other here."""
_MOST_REMEMBERED = 100_000

Keys = list[tuple[str | tuple[str, int], ...] | None]


class EmulatedMedia:
    """Media in prompts. The engine computes with a mark in each, so that its blocks differ; events name the medium."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens`: of each medium."""
        self._num_tokens = num_tokens
        self._identifiers: dict[int, str] = {}

    def shown(self, pieces: Sequence[list[int]]) -> list[int]:
        """Return ids of a prompt as clients see them: its texts, with placeholders between them."""
        return [*pieces[0], *(i for piece in pieces[1:] for i in (*[PLACEHOLDER] * self._num_tokens, *piece))]

    def computed(self, pieces: Sequence[list[int]], identifiers: Iterable[str]) -> list[int]:
        """Return ids of a prompt as the engine computes with them."""
        token_ids, at = self.shown(pieces), 0
        for piece, identifier in zip(pieces, identifiers, strict=False):
            at += len(piece)
            token_ids[at] = self._mark(identifier)
            at += self._num_tokens
        return token_ids

    def _mark(self, identifier: str) -> int:
        mark = mark_of(identifier)
        self._identifiers[mark] = identifier
        if len(self._identifiers) > _MOST_REMEMBERED:
            del self._identifiers[next(iter(self._identifiers))]
        return mark

    def name_in(self, token_ids: list[int], block_size: int, keys: Keys) -> None:
        """Put placeholders for the marks, and the media's identifiers to the keys of the blocks that they touch."""
        marks = (
            [i for i, token_id in enumerate(token_ids) if token_id in self._identifiers] if self._identifiers else ()
        )
        for start in marks:
            identifier, token_ids[start] = self._identifiers[token_ids[start]], PLACEHOLDER
            for block in range(start // block_size, min((start + self._num_tokens - 1) // block_size + 1, len(keys))):
                keys[block] = (*(keys[block] or ()), (identifier, start - block * block_size))
