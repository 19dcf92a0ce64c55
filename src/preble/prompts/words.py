"""The built-in tokenizer, which needs no model files: a token for each word."""

from __future__ import annotations

import re
from zlib import crc32

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
