"""Endpoints that take token ids or a text without a chat: SGLang's `/generate` and vLLM's `/inference/v1/generate`."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from preble.errors import RequestError
from preble.prompts.endpoints.answers import PromptTokensDetails, Usage, decoded_answer
from preble.prompts.endpoints.bodies import (
    Fields,
    PromptLimits,
    decode_prompts,
    decoded,
    positive,
)
from preble.prompts.endpoints.events import EventForm
from preble.prompts.endpoints.shared_fields import CheckedFields, check_fields, has_value

Count = Annotated[int, Meta(ge=1)]


class Sampling(CheckedFields, kw_only=True):
    """The fields read of sampling parameters, of either engine."""

    max_tokens: int | None = None
    max_new_tokens: int | None = None
    n: Count | None = None


# SGLang


class GenerateBody(CheckedFields, kw_only=True):
    """The fields read from a body for SGLang's `/generate`."""

    text: Raw = Raw(b"")
    input_ids: Raw = Raw(b"")
    sampling_params: Sampling | list[Sampling] | None = None
    stream: bool = False
    model: str | None = None
    lora_path: Any = None


_GENERATE = msgspec.json.Decoder(GenerateBody)


def read_generate(body: bytes, limits: PromptLimits) -> Fields:
    """Read a body for `/generate`. A batch is placed whole, by its first prompt. Raises: RequestError."""
    given: GenerateBody = decoded(_GENERATE, body)
    check_fields(given, limits.vocabulary)
    raw = given.text if has_value(given.text) else given.input_ids
    if raw is given.text and has_value(given.input_ids):
        raise RequestError("give one of `text` and `input_ids`, not both", param="input_ids")
    if not has_value(raw):
        raise RequestError("`text` and `input_ids` are missing; give one of them", param="text")
    prompts = decode_prompts(raw, limits, "text" if raw is given.text else "input_ids")
    params = given.sampling_params if isinstance(given.sampling_params, list) else [given.sampling_params or Sampling()]
    for one in params:
        check_fields(one, limits.vocabulary, "sampling_params.")
    num_choices = limits.num_choices([one.n for one in params], len(prompts), "sampling_params.n")
    adapter = given.lora_path if isinstance(given.lora_path, str) else None
    return Fields(
        model=adapter or given.model or None,
        stream=given.stream,
        prompts=prompts[:1],
        max_output_tokens=positive(params[0].max_new_tokens) if params else None,
        num_choices=num_choices * len(prompts),
    )


class _Meta(Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class _Generated(Struct):
    """`index`: in a list of answers, None where there is one."""

    meta_info: _Meta
    index: int | None = None


_GENERATED = msgspec.json.Decoder(_Generated | list[_Generated])
_PIECE = msgspec.json.Decoder(_Generated)


def usage_of_generated(body: bytes) -> Usage | None:
    """Raises: EngineProtocolError: the replica's answer is none of `/generate`."""
    answer = decoded_answer(_GENERATED, body, "generated text")
    return _sum([one.meta_info for one in (answer if isinstance(answer, list) else [answer])])


def _sum(metas: list[_Meta]) -> Usage | None:
    """Return the sum of answers' tokens; of the cached ones those of the first prompt, by which a list is placed."""
    if not metas or any(meta.completion_tokens is None for meta in metas):
        return None
    prompt_tokens, output_tokens = (
        sum(meta.prompt_tokens for meta in metas),
        sum(meta.completion_tokens or 0 for meta in metas),
    )
    cached = metas[0].cached_tokens
    details = None if cached is None else PromptTokensDetails(cached)
    return Usage(prompt_tokens, output_tokens, prompt_tokens + output_tokens, details)


def _usage_in_generated(tail: bytes) -> Usage | None:
    """Return the usage of the last whole event: each repeats the counts of its answer so far. None where there are
    several answers, which end far from each other."""
    for line in reversed(tail.splitlines()):
        if line.startswith(b"data:") and b'"meta_info"' in line:
            try:
                piece = _PIECE.decode(line[5:])
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                continue
            return None if piece.index is not None else _sum([piece.meta_info])
    return None


GENERATE_EVENTS = EventForm(
    error=re.compile(rb'data: ?\{"error":'),
    end=re.compile(rb"data: ?\[DONE\]"),
    end_name="[DONE]",
    usage=_usage_in_generated,
)


# vLLM


class TokensBody(CheckedFields, kw_only=True):
    """The fields read from a body for vLLM's `/inference/v1/generate`."""

    token_ids: Raw
    model: str | None = None
    sampling_params: Sampling | None = None
    stream: bool | None = None
    cache_salt: str | None = None


_TOKENS = msgspec.json.Decoder(TokensBody)


def read_tokens(body: bytes, limits: PromptLimits) -> Fields:
    """Read a body for `/inference/v1/generate`. Raises: RequestError."""
    given: TokensBody = decoded(_TOKENS, body)
    sampling = given.sampling_params or Sampling()
    check_fields(given, limits.vocabulary)
    check_fields(sampling, limits.vocabulary, "sampling_params.")
    [prompt, *others] = decode_prompts(given.token_ids, limits, "token_ids")
    if others or isinstance(prompt, (str, Raw)):
        raise RequestError("`token_ids` must be a list of token ids", param="token_ids")
    return Fields(
        model=given.model or None,
        stream=bool(given.stream),
        prompts=[prompt],
        max_output_tokens=positive(sampling.max_tokens),
        num_choices=limits.num_choices((sampling.n,), 1, "sampling_params.n"),
        cache_salt=given.cache_salt,
    )
