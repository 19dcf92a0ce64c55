"""What the emulated engine gets and gives: sequences to generate, and their tokens as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from preble.core.replica.sequence import Finished
from preble.core.types import PackedTokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """One sequence to generate. `seed` shifts the text, so that several answers to one prompt differ.

    `copied`: blocks that another replica has sent for it. `output`: what it says instead, as token ids and the text of
    each; at least `output_tokens` of them. `said_cached`: what it says of cached tokens, None for the truth.
    """

    tokens: PackedTokens
    output_tokens: int
    seed: int = 0
    namespace: str = ""
    output: tuple[Sequence[int], Sequence[str]] | None = None
    copied: frozenset[int] = frozenset()
    said_cached: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """One generated token of the sequence `index`; `finished` with its last one."""

    index: int
    text: str
    finished: Finished | None


@dataclass(slots=True)
class Generation:
    """What is generated for one HTTP request. Read it with `pieces`."""

    num_open: int
    _pending: list[Piece] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def feed(self, piece: Piece) -> None:
        self._pending.append(piece)
        self._arrived.set()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Yield what has arrived since the last time, until every sequence has its last token."""
        while self.num_open:
            await self._arrived.wait()
            self._arrived.clear()
            arrived, self._pending = self._pending, []
            self.num_open -= sum(piece.finished is not None for piece in arrived)
            yield arrived
