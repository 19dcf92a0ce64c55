"""Token ids of chats with images, videos or sounds: with a mark for each of them (`preble.engines.media_marks`).

Where a medium stands among the texts, a stand-in character shows: it is put into the messages in the medium's place and
tokenized with them. How many placeholder tokens the engine makes of the medium, only the engine knows, so it is asked.
Where it cannot be asked, a medium counts as one token.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain, groupby
from math import inf
from typing import Any

import msgspec

from preble.core.types import TOKEN_BYTES, PackedTokens, pack_tokens, unpack_tokens
from preble.engines.media_marks import STAND_IN, mark_of, with_stand_ins
from preble.errors import RequestError
from preble.prompts.endpoints.bodies import FIELDS, Text, decode_chat, decoded
from preble.prompts.tokens.source import Asker

_CONTENT = b'"content"'
_LIST_FOLLOWS = re.compile(rb"\s*:\s*\[")
_MAY_BE_MEDIA = (b"image", b"video", b"audio", b"file")
_DECODED_AT_ONCE_BYTES = 128 * 1024
_MESSAGES = msgspec.json.Decoder(list[Any])


class TokensWithMedia(ABC):
    """A source of token ids that takes chats with media too."""

    def __init__(self, engines: Asker | None) -> None:
        """`engines`: the replicas' own tokenizing, None where nobody can be asked."""
        self._engines = engines

    @abstractmethod
    async def completion(
        self, text: Text, add_special_tokens: bool, model: str | None, most_tokens: float = inf
    ) -> PackedTokens:
        """See `PromptEncoder`."""

    @abstractmethod
    async def chat_of_texts(self, body: bytes, model: str | None, most_tokens: float, engine: str) -> PackedTokens:
        """Do as `PromptEncoder.chat`, for a chat without media."""

    async def chat(self, body: bytes, model: str | None, most_tokens: float = inf, *, engine: str = "") -> PackedTokens:
        if not _may_have_media(body):
            return await self.chat_of_texts(body, model, most_tokens, engine)
        path = "" if self._engines is None else self._engines.path_of(model)
        is_small = len(body) <= _DECODED_AT_ONCE_BYTES
        texts, identifiers = (
            without_media(body, path) if is_small else await asyncio.to_thread(without_media, body, path)
        )
        if not identifiers:
            return await self.chat_of_texts(body, model, most_tokens, engine)
        as_texts = await self.chat_of_texts(texts, model, most_tokens, engine)
        marks = [mark_of(identifier) for identifier in identifiers]
        stand_in = await self.completion(STAND_IN, False, model)
        places = places_of(stand_in, as_texts)
        if len(places) != len(marks):  # where they stand is not clear: nobody else's prompt matches
            return PackedTokens(pack_tokens(marks) + as_texts)
        groups = grouped(marks, places, len(stand_in))
        whole = await self._whole(body, model)
        marked = None if whole is None else with_marks(whole, as_texts, groups)
        return marked or with_marks_for(as_texts, len(stand_in), places, groups)

    async def _whole(self, body: bytes, model: str | None) -> PackedTokens | None:
        """Return the engine's ids of all of it. Where it refuses, it may only be unable to tokenize media."""
        try:
            return None if self._engines is None else await self._engines.ask(body, model)
        except RequestError:
            return None


def _may_have_media(body: bytes) -> bool:
    """Return whether the chat may have a medium: only a content that is a list of parts has any.

    >>> _may_have_media(b'{"content": "an image"}'), _may_have_media(b'{"content": [{"type": "image_url"}]}')
    (False, True)
    """
    at = body.find(_CONTENT)
    while at >= 0 and _LIST_FOLLOWS.match(body, at + len(_CONTENT)) is None:
        at = body.find(_CONTENT, at + 1)
    return at >= 0 and any(word in body for word in _MAY_BE_MEDIA)


def without_media(body: bytes, path: str) -> tuple[bytes, list[str]]:
    """Return the chat with a stand-in for each medium, and the media's identifiers. Raises: RequestError."""
    fields = decode_chat(body)
    settings = b"".join(bytes(raw) for raw in (fields.mm_processor_kwargs, fields.media_io_kwargs) if raw != b"null")
    messages, identifiers = with_stand_ins(decoded(_MESSAGES, fields.messages, "messages"), path, settings)
    if not identifiers:
        return body, []
    whole = decoded(FIELDS, body)
    whole["messages"] = msgspec.Raw(msgspec.json.encode(messages))
    return msgspec.json.encode(whole), identifiers


def with_marks(whole: PackedTokens, as_texts: PackedTokens, groups: Sequence[Sequence[int]]) -> PackedTokens | None:
    """Return the engine's ids with marks where media's placeholders begin; None where they are not clear.

    `as_texts`: ids of the same chat without media. What is in a run and never in there is a placeholder. `groups`: the
    marks of media with nothing between them, which are one run: its first tokens become all their marks.

    >>> whole, texts = pack_tokens([1, 9, 9, 9, 2, 2]), pack_tokens([1, 5, 2, 2])
    >>> list(unpack_tokens(with_marks(whole, texts, [[70, 71]])))
    [1, 70, 71, 9, 2, 2]
    """
    token_ids, known = list(unpack_tokens(whole)), set(unpack_tokens(as_texts))
    runs, at = [], 0
    for token_id, run in groupby(token_ids):
        length = sum(1 for _ in run)
        if length > 1 and token_id not in known:
            runs.append((at, length))
        at += length
    if not runs or len(runs) != len(groups) != 1 or any(len(g) > n for g, (_, n) in zip(groups, runs, strict=False)):
        return None
    for marks, (start, _) in zip(groups, runs, strict=False):
        token_ids[start : start + len(marks)] = marks
    return pack_tokens(token_ids)


def with_marks_for(
    as_texts: PackedTokens, size: int, places: Sequence[int], groups: Sequence[Sequence[int]]
) -> PackedTokens:
    """Return the ids with marks for the stand-ins at `places`, each of which has `size` bytes.

    >>> list(unpack_tokens(with_marks_for(pack_tokens([1, 5, 2]), 4, [4], [[70]])))
    [1, 70, 2]
    """
    pieces, after = [], 0
    for place, mark in zip(places, chain.from_iterable(groups), strict=True):
        pieces += [as_texts[after:place], pack_tokens([mark])]
        after = place + size
    return PackedTokens(b"".join([*pieces, as_texts[after:]]))


def places_of(sought: bytes, tokens: bytes) -> list[int]:
    """Return where `sought` begins, in bytes and at whole tokens only."""
    places, at = [], tokens.find(sought)
    while at >= 0:
        is_whole = at % TOKEN_BYTES == 0
        places += [at] if is_whole else []
        at = tokens.find(sought, at + (len(sought) if is_whole else 1))
    return places


def grouped(marks: Sequence[int], places: Sequence[int], size: int) -> list[list[int]]:
    """Return the marks, those together whose stand-ins follow one another.

    >>> grouped([70, 71, 72], [4, 8, 20], 4)
    [[70, 71], [72]]
    """
    groups: list[list[int]] = []
    for mark, place, before in zip(marks, places, [-1, *places], strict=False):
        if place == before + size:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return groups
