"""Prompts of workloads as packed token ids."""

from __future__ import annotations

from functools import lru_cache

from preble.core.types import PackedTokens, pack_tokens
from preble.lab.workloads.model import WorkloadRequest
from preble.prompts.words import word_tokens


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
