"""Bodies with token ids in place of their text, so that the engine need not tokenize it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from msgspec import Raw

from preble.core.types import TOKEN_BYTES, PackedTokens, unpack_tokens
from preble.serving.endpoints.table import COMPLETIONS, GENERATE

_FIELDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {COMPLETIONS.path: ("prompt", "prompt"), GENERATE.path: ("text", "input_ids")}
)
"""By path: the field with the text, and the one for ids."""
_NEED_THE_TEXT = ("echo", "suffix", "truncate_prompt_tokens", "prompt_embeds", "input_embeds", "image_data")
"""Fields with which an engine's answer to ids may differ from its answer to the text."""
_NOTHING = (b"", b"null", b"false")
_ENCODED_AT_ONCE = 8192 * TOKEN_BYTES
"""Encoding this many takes about a quarter of a millisecond."""


async def with_ids(path: str, body: bytes, tokens: PackedTokens) -> bytes:
    """Return the body with `tokens` in place of its text; unchanged if the engine's answer may differ then."""
    if path not in _FIELDS:
        return body
    fields = msgspec.json.decode(body, type=dict[str, Raw])
    text, ids = _FIELDS[path]
    is_one_text = bytes(fields.get(text, Raw(b""))).startswith(b'"')
    if not is_one_text or any(bytes(fields.get(name, Raw(b""))) not in _NOTHING for name in _NEED_THE_TEXT):
        return body
    del fields[text]
    return msgspec.json.encode(fields | {ids: Raw(await _encoded(tokens))})


async def _encoded(tokens: PackedTokens) -> bytes:
    """Return the ids as a JSON list. Gives up the event loop in between."""
    pieces = []
    for start in range(0, len(tokens), _ENCODED_AT_ONCE):
        pieces.append(msgspec.json.encode(list(unpack_tokens(tokens[start : start + _ENCODED_AT_ONCE])))[1:-1])
        await asyncio.sleep(0)
    return b"[%b]" % b",".join(pieces)
