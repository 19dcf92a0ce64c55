"""Bodies with token ids in place of their text, so that the engine need not tokenize it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from msgspec import Raw

from preble.core.types import TOKEN_BYTES, PackedTokens, unpack_tokens
from preble.prompts.endpoints.bodies import FIELDS, decoded
from preble.prompts.endpoints.table import COMPLETIONS, GENERATE

_FIELDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {COMPLETIONS.path: ("prompt", "prompt"), GENERATE.path: ("text", "input_ids")}
)
"""By path: the field with the text, and the one for ids."""
_OF_BOTH = frozenset({"model", "stream", "rid", "cache_salt"})
_OF_COMPLETIONS = _OF_BOTH | {
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos", "logprobs"),
    *("stream_options", "user", "service_tier", "skip_special_tokens", "spaces_between_special_tokens", "request_id"),
    *("include_stop_str_in_output", "return_token_ids", "return_tokens_as_token_ids", "prompt_logprobs"),
    *("response_format", "structured_outputs", "regex", "json_schema", "ebnf", "no_stop_trim"),
}
_OF_GENERATE = _OF_BOTH | {
    *("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"),
}
_SAME_ANSWER: Mapping[str, frozenset[str]] = MappingProxyType(
    {COMPLETIONS.path: _OF_COMPLETIONS, GENERATE.path: _OF_GENERATE}
)
"""By path: fields that both engines apply after tokenizing, or not at all. A body with any other field stays as it
is: `echo`, `suffix`, `truncate_prompt_tokens`, `add_special_tokens` (SGLang ignores it), or one of a newer engine."""
_ENCODED_AT_ONCE = 8192 * TOKEN_BYTES
"""Encoding this many takes about a quarter of a millisecond."""


async def with_ids(path: str, body: bytes, tokens: PackedTokens) -> bytes:
    """Return the body with `tokens` in place of its text; unchanged if the engine's answer may differ then.

    Raises: RequestError: the body is not valid JSON.
    """
    if path not in _FIELDS:
        return body
    fields = decoded(FIELDS, body)
    text, ids = _FIELDS[path]
    is_one_text = bytes(fields.pop(text, Raw(b""))).startswith(b'"')
    if not is_one_text or any(_may_differ(fields[name], name) for name in fields.keys() - _SAME_ANSWER[path]):
        return body
    return msgspec.json.encode(fields | {ids: Raw(await _encoded(tokens))})


def _may_differ(value: Raw, name: str) -> bool:
    """Return whether this field, of which we do not know that it changes nothing, is set."""
    return bytes(value) != b"null" and not (name == "echo" and bytes(value) == b"false")


async def _encoded(tokens: PackedTokens) -> bytes:
    """Return the ids as a JSON list. Gives up the event loop in between."""
    pieces = []
    for start in range(0, len(tokens), _ENCODED_AT_ONCE):
        pieces.append(msgspec.json.encode(list(unpack_tokens(tokens[start : start + _ENCODED_AT_ONCE])))[1:-1])
        await asyncio.sleep(0)
    return b"[%b]" % b",".join(pieces)
