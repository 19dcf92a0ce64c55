"""A tokenizer that needs no model files: prompts as packed token ids."""

from __future__ import annotations

import re
from functools import lru_cache
from zlib import crc32

from preble.core.types import PackedTokens, pack_tokens
from preble.workloads.model import WorkloadRequest

VOCABULARY = 32_000
_WORD = re.compile(r" ?\w{1,12}|\s|[^\w\s]")


def split_words(text: str) -> list[str]:
    """Return words (with the space before them), white space and signs: the tokens of the built-in tokenizer.

    >>> split_words("One word, two")
    ['One', ' word', ',', ' two']
    """
    pieces: list[str] = _WORD.findall(text)
    return pieces


def word_tokens(text: str) -> list[int]:
    """Return a token id for each word, a stable hash: the same text always has the same ids. O(length)."""
    return [crc32(word.encode("utf-8", "surrogatepass")) % VOCABULARY for word in split_words(text)]


def packed_prompt(request: WorkloadRequest) -> PackedTokens:
    """Return the whole prompt as packed ids; text by `word_tokens`. O(its length); shared texts are tokenized once."""
    if request.segments[0].tokens is not None:
        return PackedTokens(b"".join(segment.tokens or b"" for segment in request.segments))
    parts: list[PackedTokens] = []
    rest = ""
    for segment in request.segments:
        text = segment.text or ""
        # No word crosses the end of a line, so a text that ends with one can be tokenized on its own.
        if segment.segment_id is not None and text.endswith("\n") and (not rest or rest.endswith("\n")):
            parts += [pack_tokens(word_tokens(rest)), _shared_tokens(text)]
            rest = ""
        else:
            rest += text
    return PackedTokens(b"".join([*parts, pack_tokens(word_tokens(rest))]))


@lru_cache(maxsize=4096)
def _shared_tokens(text: str) -> PackedTokens:
    return pack_tokens(word_tokens(text))
