"""How gateways name prompts to each other: by a hash for the beginning that all know, by token ids for the rest.

A prompt is cut into chunks. A chunk's name is the hash of the name before it and of its tokens, so a name stands for
the whole prompt up to there. Every gateway keeps the chunks that any gateway has lately sent on the bus, and drops the
least recently used first. It names only chunks sent within the last half of that memory: a peer that heard the same
messages still has those.

A peer that does not know a chunk after all (it joined late, or messages were lost) says so, and gets it whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from preble.core.types import TOKEN_BYTES, PackedTokens

CHUNK_TOKENS = 128
NAME_BYTES = 16
LONGEST_TAIL = 512
"""In chunks. A longer rest goes out in several pieces: NATS takes no message above a megabyte."""
DEFAULT_BUDGET_BYTES = 128 * 1024 * 1024
_CHUNK_BYTES = CHUNK_TOKENS * TOKEN_BYTES
_ENTRY_BYTES = 800
"""What a chunk takes in memory: its tokens, its name, and the entries for both."""


class PromptName(NamedTuple):
    """A prompt: the beginning that `head` names (empty for none), followed by the packed tokens `tail`."""

    head: bytes
    tail: bytes


@dataclass(slots=True)
class _Chunk:
    before: bytes
    tokens: bytes
    told_at: int


class PromptBook:
    """The chunks of prompts that the gateways have sent each other, as one gateway knows them.

    `budget_bytes`: the most memory that they take.

    >>> from preble.core.types import pack_tokens
    >>> ours, theirs = PromptBook(), PromptBook()
    >>> prompt = pack_tokens(range(1000))
    >>> [theirs.read(name) == prompt for name in ours.names(prompt)]
    [True]
    >>> [len(name.tail) // 4 for name in ours.names(prompt)]  # only the last chunk is unknown: it is not whole
    [104]
    """

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()
        self._budget = budget_bytes // _ENTRY_BYTES
        self._told = 0
        self._doubt = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def names(self, prompt: PackedTokens, *, whole: bool = False) -> list[PromptName]:
        """Return the names to send for a prompt, in order. The last one names all of it; mostly it is the only one.

        From then on, the prompt counts as known to all. `whole`: give all its tokens, as if nothing of it were known.
        O(prompt).
        """
        names = list(_names(b"", prompt))
        known = 0
        while not whole and known < len(names) and self._is_known(names[known]):
            known += 1
        self._learn(names, prompt)
        pieces = []
        for start in range(known, max(len(names), known + 1), LONGEST_TAIL):
            is_last = start + LONGEST_TAIL >= len(names)
            end = len(prompt) if is_last else (start + LONGEST_TAIL) * _CHUNK_BYTES
            pieces.append(PromptName(names[start - 1] if start else b"", prompt[start * _CHUNK_BYTES : end]))
        return pieces

    def read(self, name: PromptName) -> PackedTokens | None:
        """Return the prompt that a peer named, and keep its chunks; None if its head is unknown. O(prompt)."""
        above: list[tuple[bytes, _Chunk]] = []
        at = name.head
        while at:
            chunk = self._chunks.get(at)
            if chunk is None:
                return None
            above.append((at, chunk))
            at = chunk.before
        self._learn(list(_names(name.head, name.tail)), name.tail, name.head)
        for at, chunk in above:
            if at in self._chunks:
                self._touch(at, chunk)
        return PackedTokens(b"".join((*(chunk.tokens for _, chunk in reversed(above)), name.tail)))

    def doubt(self, head: bytes) -> None:
        """A peer does not know this name: next time, give the tokens that it stands for. O(prompt)."""
        while head and (chunk := self._chunks.get(head)) is not None and chunk.told_at >= 0:
            chunk.told_at = -1
            head = chunk.before

    def doubt_all(self) -> None:
        """A new peer knows nothing yet: give the tokens of every prompt again."""
        self._told += 1
        self._doubt = self._told

    def _is_known(self, name: bytes) -> bool:
        chunk = self._chunks.get(name)
        return chunk is not None and chunk.told_at >= max(self._doubt, self._told - self._budget // 2)

    def _learn(self, names: list[bytes], tokens: bytes, before: bytes = b"") -> None:
        """Keep the chunks of these names. Touches the first chunk last, so that it stays as long as those behind it."""
        for i in range(len(names) - 1, -1, -1):
            chunk = self._chunks.get(names[i])
            if chunk is None:
                own = tokens[i * _CHUNK_BYTES : (i + 1) * _CHUNK_BYTES]
                self._told += 1
                self._chunks[names[i]] = _Chunk(names[i - 1] if i else before, own, self._told)
            else:
                self._touch(names[i], chunk)
        while len(self._chunks) > self._budget:
            self._chunks.popitem(last=False)

    def _touch(self, name: bytes, chunk: _Chunk) -> None:
        chunk.told_at = self._told
        self._chunks.move_to_end(name)


def _names(before: bytes, tokens: bytes) -> Iterator[bytes]:
    """Yield the names of the whole chunks of `tokens`, which continue the prompt that `before` names."""
    for start in range(0, len(tokens) - _CHUNK_BYTES + 1, _CHUNK_BYTES):
        before = blake2b(before + tokens[start : start + _CHUNK_BYTES], digest_size=NAME_BYTES).digest()
        yield before
