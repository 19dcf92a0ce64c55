"""The wire: what of a request is decoded, and errors in OpenAI's form.

A body is touched once. Only what placing needs is decoded; everything else is skipped by the parser, and the original
bytes go to the replica unchanged, so that parameters that the gateway has never heard of work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from preble.core.types import PackedTokens, pack_tokens
from preble.errors import (
    EngineError,
    EngineGone,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    NoReplicaError,
    Overloaded,
    PrebleError,
    RequestError,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
_MOST_TOKENS = 2**26
"""Of one request: tens of times what the longest contexts hold."""
Prompt = str | PackedTokens
"""A prompt of a completion: text, or packed token ids."""


class StreamOptions(Struct):
    include_usage: bool | None = None


class CompletionBody(Struct):
    """What is read of a body for `/v1/completions`."""

    prompt: Raw = Raw(b"")
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: int | None = None
    cache_salt: str | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None


class ChatBody(Struct):
    """What is read of a body for `/v1/chat/completions`; messages, tools and the like stay as they came."""

    messages: Raw = Raw(b"")
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    cache_salt: str | None = None
    tools: Raw = Raw(b"null")
    documents: Raw = Raw(b"null")
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    truncate_prompt_tokens: int | None = None


class PromptTokensDetails(Struct):
    cached_tokens: int | None = None


class Usage(Struct, omit_defaults=True):
    """Tokens of an answer, as engines report them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def output_tokens(self) -> int | None:
        """Tokens generated; None where that is not said, or cannot be."""
        return _possible(self.completion_tokens)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were cached; None where that is not said, or cannot be."""
        return _possible(self.prompt_tokens_details.cached_tokens) if self.prompt_tokens_details else None


def _possible(count: int | None) -> int | None:
    """A count of tokens as it is reported, None for one that is none: engines have been seen to say -1 for "unknown".

    >>> _possible(0), _possible(-1), _possible(10**30)
    (0, None, None)
    """
    return count if count is not None and 0 <= count <= _MOST_TOKENS else None


class Answer(Struct):
    """What is read of a whole answer or of one streamed piece of it."""

    choices: Raw
    usage: Usage | None = None


_COMPLETION = msgspec.json.Decoder(CompletionBody)
_CHAT = msgspec.json.Decoder(ChatBody)
_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(list[str])
_IDS = msgspec.json.Decoder(list[TokenId])
_ID_LISTS = msgspec.json.Decoder(list[list[TokenId]])
_ANSWER = msgspec.json.Decoder(Answer)
_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_LIST_START = re.compile(rb"\[\s*(.)", re.DOTALL)
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


def decode_completion(body: bytes) -> CompletionBody:
    """Raises: RequestError: not JSON, or a field of a wrong type; `param` names it."""
    decoded: CompletionBody = _decoded(_COMPLETION, body)
    if not decoded.prompt:
        raise RequestError("`prompt` is missing; give a text, a list of token ids, or a list of either", param="prompt")
    return decoded


def decode_chat(body: bytes) -> ChatBody:
    """Raises: RequestError: not JSON, or a field of a wrong type; `param` names it."""
    decoded: ChatBody = _decoded(_CHAT, body)
    if not bytes(decoded.messages).startswith(b"["):
        raise RequestError("`messages` must be a list of messages", param="messages")
    return decoded


def _decoded(decoder: msgspec.json.Decoder[Any], data: bytes | Raw, param: str | None = None) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        field = (param or "") + (found[1] if found else "")
        raise RequestError(f"{_PATH.sub('', text)} in `{field or 'the body'}`", param=field or None) from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply", param=param) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error


def decode_prompts(raw: Raw) -> tuple[list[Prompt], bool]:
    """The prompts of a completion, and whether it was a list of prompts. O(length).

    Raises: RequestError: neither a text, nor token ids, nor a list of either; an empty list.

    >>> decode_prompts(Raw(b'"hello"'))
    (['hello'], False)
    >>> decode_prompts(Raw(b'["a", "b"]'))
    (['a', 'b'], True)
    >>> [len(prompt) for prompt in decode_prompts(Raw(b'[[1, 2, 3], [4]]'))[0]]
    [12, 4]
    """
    start = _LIST_START.match(raw)
    if start is None:
        return [_decoded(_TEXT, raw, "prompt")], False
    match start[1]:
        case b"]":
            raise RequestError("`prompt` is an empty list; give at least one token or one text", param="prompt")
        case b'"':
            return _decoded(_TEXTS, raw, "prompt"), True
        case b"[":
            return [_packed(ids) for ids in _decoded(_ID_LISTS, raw, "prompt")], True
        case _:
            return [_packed(_decoded(_IDS, raw, "prompt"))], False


def _packed(ids: list[int]) -> PackedTokens:
    if not ids:
        raise RequestError("`prompt` has an empty list of token ids; give at least one token", param="prompt")
    return pack_tokens(ids)


def decode_answer(body: bytes) -> Answer:
    """Raises: EngineProtocolError: the replica's answer is not a completion."""
    try:
        return _ANSWER.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise EngineProtocolError(f"the replica's answer is not a completion: {error}") from error


def is_json_object(body: bytes) -> bool:
    """Whether this is JSON, and an object.

    >>> is_json_object(b'{"error": {}}'), is_json_object(b"<html>"), is_json_object(b'"text"')
    (True, False, False)
    """
    try:
        _OBJECT.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True


class ErrorForm(Struct, frozen=True):
    """An error as a client sees it."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    def body(self) -> bytes:
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": fields})


_ENGINE_CODES: Mapping[type[EngineError], str] = MappingProxyType(
    {
        EngineRefused: "engine_refused",
        EngineGone: "engine_gone",
        EngineProtocolError: "engine_protocol_error",
    }
)


def error_form(error: PrebleError) -> ErrorForm:
    """How an error is told to a client.

    >>> error_form(NoReplicaError("no replica is up", retry_after_s=2.0)).status
    503
    """
    text = str(error)
    match error:
        case RequestError():
            return ErrorForm(error.status, "invalid_request_error", error.code, text, error.param)
        case NoReplicaError():
            return ErrorForm(503, "service_unavailable", "no_replica", text, retry_after_s=error.retry_after_s)
        case Overloaded():
            return ErrorForm(429, "rate_limit_error", "overloaded", text, retry_after_s=error.retry_after_s)
        case EngineTimeout():
            return ErrorForm(504, "engine_error", "engine_timeout", text)
        case EngineError():
            return ErrorForm(502, "engine_error", _ENGINE_CODES.get(type(error), "engine_error"), text)
        case _:
            return ErrorForm(500, "internal_error", "internal_error", "the gateway failed; its log has the details")
