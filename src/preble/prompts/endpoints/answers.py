"""Replicas' whole answers, read for what the scheduler learns of them: tokens generated, prompt tokens cached."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct

from preble.errors import EngineProtocolError

MOST_TOKENS = 2**26
"""The most tokens believed of one answer, asked for or reported: tens of times the longest context."""


class PromptTokensDetails(Struct):
    cached_tokens: int | None = None


class Usage(Struct, omit_defaults=True):
    """The tokens of an answer, as engines report them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def output_tokens(self) -> int | None:
        """Tokens generated; None if the engine reports none or an impossible number."""
        return _possible(self.completion_tokens)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were cached; None if the engine reports none or an impossible number."""
        return _possible(self.prompt_tokens_details.cached_tokens) if self.prompt_tokens_details else None


def _possible(count: int | None) -> int | None:
    """Return a reported count of tokens, or None if it cannot be one: some engines report -1 for "unknown".

    >>> _possible(0), _possible(-1), _possible(10**30)
    (0, None, None)
    """
    return count if count is not None and 0 <= count <= MOST_TOKENS else None


class _Completion(Struct):
    choices: Raw
    usage: Usage | None = None


_COMPLETION = msgspec.json.Decoder(_Completion)


def usage_of_completion(body: bytes) -> Usage | None:
    """Return the usage of an answer to `/v1/completions` or `/v1/chat/completions`, None if it reports none.

    Raises: EngineProtocolError: the replica's answer is not a completion.
    """
    usage: Usage | None = decoded_answer(_COMPLETION, body, "a completion").usage
    return usage


class _Event(Struct):
    usage: Usage | None = None


_EVENT = msgspec.json.Decoder(_Event)


def usage_of_event(data: bytes) -> Usage | None:
    """Return the usage in the data of one event, None if there is none or it is no JSON."""
    try:
        return _EVENT.decode(data).usage
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def decoded_answer(decoder: msgspec.json.Decoder[Any], body: bytes, what: str) -> Any:
    """Raises: EngineProtocolError: the answer is not `what`."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise EngineProtocolError(f"the replica's answer is not {what}: {error}") from error
