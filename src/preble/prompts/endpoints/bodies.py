"""Request bodies: the fields that placing needs are decoded, the rest is skipped.

The original bytes go to the replica unchanged, so parameters that Preble has never heard of work too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct

from preble.core.types import TOKEN_BYTES, PackedTokens, pack_tokens
from preble.errors import RequestError, prompt_too_long
from preble.prompts.endpoints.answers import MOST_TOKENS
from preble.prompts.endpoints.shared_fields import SessionFields, check_fields, session_in, tier_in

_ANY_ID = 2**32
TokenId = Annotated[int, Meta(ge=0, lt=_ANY_ID)]
_PIECE_BYTES = 64 * 1024
"""How much of a list of token ids is decoded in one go: less than a millisecond of work."""


@dataclass(slots=True)
class KnownPrefix:
    """A prompt's text in a body, of whose prefix token ids are known: the inside of a JSON string.

    `start`, `known`, `end`: where it begins, where what is known of it ends, and where it ends, once the body is read.
    `parts`: of whoever makes its token ids, who takes them.
    """

    body: bytes
    start: int
    known: int
    parts: object
    end: int = 0

    def rest(self) -> bytes:
        """Return the body without what is known of the text. It says the same of every other field."""
        return b"".join((self.body[: self.start], memoryview(self.body)[self.known :]))

    def is_all_of(self, prompts: Sequence[Prompt], rest: bytes) -> bool:
        """Take the prompts of `rest`. Return whether the only one is the rest of this text, and so ends where it does.

        Another may come from a second field of the same name, which counts in place of the first.
        """
        [text, *others] = prompts
        if others or not isinstance(text, Raw) or _address(text) - _address(rest) != self.start - 1:
            return False
        self.end = self.known + memoryview(text).nbytes - 2
        return True


Text = str | Raw
"""A prompt's text. `Raw`: as in the body, a JSON string that is not decoded yet."""
Prompt = Text | PackedTokens
"""A prompt: text, or packed token ids."""


BYTES_PER_TOKEN = 4
"""Assumed of a body that is placed by load: about as in prose."""


@dataclass(slots=True, kw_only=True)
class Fields:
    """What placing needs of a body, whatever its endpoint.

    `prompts`: texts or token ids, each to be placed on its own. `begun`: the only prompt, in place of `prompts`, if
    token ids of its beginning are known. `chat`: the body of a chat with the same prompt, for what makes token ids. Of
    the three, at most one is given. Where none is, the request is placed `by_load`, and `load_tokens` estimates its
    length. `is_translated`: `chat` was made here, of a body in another form.
    `special_tokens_on_vllm`: vLLM adds special tokens to its rendered text, whatever the template writes. `continues`:
    the id of an earlier response, which one replica has stored. `truncate_prompt_tokens`: only that many of a prompt's
    last tokens count, None for all. `num_choices`: answers to each of `prompts`, or to the chat. `session`: as the body
    names it.
    """

    model: str | None = None
    stream: bool = False
    prompts: Sequence[Prompt] = ()
    begun: KnownPrefix | None = None
    chat: bytes = b""
    load_tokens: int = 0
    is_translated: bool = False
    special_tokens_on_vllm: bool = False
    continues: str | None = None
    max_output_tokens: int | None = None
    num_choices: int = 1
    cache_salt: str | None = None
    service_tier: str | None = None
    session: str | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    by_load: bool = field(init=False)
    most_output_tokens: int | None = field(init=False)
    """The limit on the output tokens of all answers to a prompt, None if the client gave none."""

    def __post_init__(self) -> None:
        self.by_load = not self.prompts and not self.chat and self.begun is None
        limit = self.max_output_tokens
        self.most_output_tokens = None if limit is None else limit * self.num_choices

    def truncated(self, tokens: PackedTokens) -> PackedTokens:
        """Return the end of a prompt that is left after `truncate_prompt_tokens`."""
        limit = self.truncate_prompt_tokens
        return PackedTokens(tokens[-limit * TOKEN_BYTES :]) if limit is not None and limit > 0 else tokens


class StreamOptions(Struct):
    include_usage: bool | None = None


class CompletionBody(SessionFields, kw_only=True):
    """The fields read from a body for `/v1/completions`."""

    prompt: Raw = Raw(b"")
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: int | None = None
    cache_salt: str | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None


class ChatBody(SessionFields, kw_only=True):
    """The fields read from a body for `/v1/chat/completions`. Messages, tools, documents and options of media stay
    encoded."""

    messages: Raw = Raw(b"")
    input_ids: Raw = Raw(b"")
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    cache_salt: str | None = None
    tools: Raw = Raw(b"null")
    tool_choice: Raw = Raw(b"null")
    documents: Raw = Raw(b"null")
    mm_processor_kwargs: Raw = Raw(b"")
    media_io_kwargs: Raw = Raw(b"")
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    truncate_prompt_tokens: int | None = None


_COMPLETION = msgspec.json.Decoder(CompletionBody)
_CHAT = msgspec.json.Decoder(ChatBody)
_TEXT = msgspec.json.Decoder(str)
WHOLE = msgspec.json.Decoder(dict[str, Any])
FIELDS = msgspec.json.Decoder(dict[str, Raw])
"""A body in whole, and its fields by name, each as it came. What was read of a body before may have skipped what these
cannot read: names and texts that are no UTF-8, numbers that are too large."""
_IDS = msgspec.json.Decoder(list[TokenId])
_IN_NO_INTEGER = b'.eEn"[{'
"""Every JSON value but an integer has one of these, and so has every list and object."""
_LISTS = msgspec.json.Decoder(list[Raw])
_LIST_START = re.compile(rb"\[\s*(.)", re.DOTALL)
TEXT_OF_COMPLETION = re.compile(
    rb'\{\s*(?:"\w{1,40}"\s*:\s*(?:"[^"\\]{0,200}"|[\w.+-]{1,20})\s*,\s*){0,20}"prompt"\s*:\s*"'
)
"""The usual beginning of a completion's body, up to the inside of its text: at most short fields are before it."""
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


def decode_completion(body: bytes) -> CompletionBody:
    """Raises: RequestError: not JSON, or a field of a wrong type; `param` names it."""
    given: CompletionBody = decoded(_COMPLETION, body)
    if not given.prompt:
        raise RequestError("`prompt` is missing; give a text, a list of token ids, or a list of either", param="prompt")
    return given


def decode_chat(body: bytes) -> ChatBody:
    """Raises: RequestError: not JSON, or a field of a wrong type; `param` names it."""
    given: ChatBody = decoded(_CHAT, body)
    if not starts_with(given.messages, b"["):
        raise RequestError("`messages` must be a list of messages", param="messages")
    return given


def read_completion(body: bytes, limits: PromptLimits) -> Fields:
    """Read a body for `/v1/completions`. Raises: RequestError."""
    given = decode_completion(body)
    check_fields(given, limits.vocabulary)
    session, tier = session_in(given), tier_in(given)
    if given.truncate_prompt_tokens is not None:
        limits = limits._replace(tokens=inf)
    prompts = decode_prompts(given.prompt, limits)
    return Fields(
        model=given.model or None,
        stream=bool(given.stream),
        prompts=prompts,
        max_output_tokens=positive(given.max_tokens),
        num_choices=limits.num_choices((given.n,), len(prompts)),
        cache_salt=given.cache_salt,
        service_tier=tier,
        session=session,
        add_special_tokens=given.add_special_tokens,
        truncate_prompt_tokens=given.truncate_prompt_tokens,
    )


def read_chat(body: bytes, limits: PromptLimits) -> Fields:
    """Read a body for `/v1/chat/completions`. Raises: RequestError."""
    given = decode_chat(body)
    check_fields(given, limits.vocabulary)
    check_ids(given.input_ids, limits, "input_ids")
    limit = given.max_tokens if given.max_completion_tokens is None else given.max_completion_tokens
    return Fields(
        model=given.model or None,
        stream=bool(given.stream),
        chat=body,
        max_output_tokens=positive(limit),
        num_choices=limits.num_choices((given.n,)),
        cache_salt=given.cache_salt,
        service_tier=tier_in(given),
        session=session_in(given),
        truncate_prompt_tokens=given.truncate_prompt_tokens,
    )


def positive(limit: int | None) -> int | None:
    """Return a limit on output tokens, at most `MOST_TOKENS`, None where the client gave none."""
    return min(limit, MOST_TOKENS) if limit is not None and limit > 0 else None


def decoded(decoder: msgspec.json.Decoder[Any], data: bytes | Raw, param: str | None = None) -> Any:
    """Decode a body, or the field `param` of one. Raises: RequestError: not JSON, or of a wrong type."""
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


class PromptLimits(NamedTuple):
    """`prompts`: in one request. `tokens`: of one prompt; infinity for any number. `answers`: to one prompt.
    `vocabulary`: how many token ids the model has, None if that is not known."""

    prompts: int
    tokens: float
    answers: int = 128
    vocabulary: int | None = None

    def num_choices(self, asked: Iterable[int | None], num_prompts: int = 1, param: str = "n") -> int:
        """Return how many answers each prompt gets. `asked`: what the field asks for, or each field of that name.

        Raises: RequestError: they are too many, for one prompt or for all of them.

        >>> PromptLimits(8, 10).num_choices([None, 3], 2)
        3
        """
        count = max((number for number in asked if number is not None), default=1)
        if count > self.answers:
            text = f"`{param}` asks for {count} answers to a prompt; at most {self.answers} are given"
            raise RequestError(f"{text} (`limits.max_answers`)", param=param)
        if count * num_prompts > (most := max(self.prompts, self.answers)):
            text = f"{num_prompts} prompts with {count} answers each are {count * num_prompts} answers; at most {most}"
            raise RequestError(f"{text} are given (`limits.max_prompts`)", param=param)
        return count


def decode_prompts(raw: Raw, limits: PromptLimits, param: str = "prompt") -> list[Prompt]:
    """Return the prompts in the field `param`. O(length).

    What is surely over a limit is refused undecoded.
    Raises: RequestError: not a text, token ids, or a list of either; an empty list; too many prompts. PromptTooLong.

    >>> limits = PromptLimits(2, 10)
    >>> [bytes(text) for text in decode_prompts(Raw(b'"hello"'), limits)]
    [b'"hello"']
    >>> [decode_text(text) for text in decode_prompts(Raw(b'["a", "b"]'), limits)]
    ['a', 'b']
    >>> [len(prompt) for prompt in decode_prompts(Raw(b'[[1, 2, 3], [4]]'), limits)]
    [12, 4]
    """
    if starts_with(raw, b'"'):
        return [raw]
    start = _LIST_START.match(raw)
    if start is None:
        return [_text(raw, param)]
    match start[1]:
        case b"]":
            raise RequestError(f"`{param}` is an empty list; give at least one token or one text", param=param)
        case b'"':
            texts: list[Prompt] = [_text(text, f"{param}[{i}]") for i, text in enumerate(decoded(_LISTS, raw, param))]
            _check_number(len(texts), limits, param)
            return texts
        case b"[":
            _check_number(bytes(raw).count(b"[") - 1, limits, param)
            return [_packed(ids, limits, param) for ids in decoded(_LISTS, raw, param)]
        case _:
            return [_packed(raw, limits, param)]


def check_ids(raw: Raw, limits: PromptLimits, param: str) -> None:
    """Check a field that may have token ids beside other prompts. O(length). Raises: RequestError: they are no ids."""
    has_others = any(mark in bytes(raw) for mark in (b'"', b"{"))
    if limits.vocabulary is not None and starts_with(raw, b"[") and not has_others:
        decode_prompts(raw, limits._replace(prompts=_ANY_ID, tokens=inf), param)


def _address(data: bytes | Raw) -> int:
    """Return where in memory it is. `Raw` is a part of what it was decoded from."""
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def _text(raw: Raw, param: str) -> Raw:
    """Return a text as it is. Raises: RequestError: it is not a text."""
    if not starts_with(raw, b'"'):
        decode_text(raw, param)
    return raw


def starts_with(raw: Raw, mark: bytes) -> bool:
    """Return whether a field of the body begins with this byte. Copies nothing, however long the field is."""
    return memoryview(raw)[:1] == mark


def decode_text(raw: Raw | bytes, param: str = "prompt") -> str:
    """Return the text of a JSON string. Raises: RequestError: it is none, or no UTF-8."""
    text: str = decoded(_TEXT, raw, param)
    return text


def _check_number(count: int, limits: PromptLimits, param: str) -> None:
    if count > limits.prompts:
        raise RequestError(
            f"`{param}` has {count} prompts; at most {limits.prompts} are accepted (`limits.max_prompts`)",
            param=param,
        )


def _packed(raw: Raw, limits: PromptLimits, param: str) -> PackedTokens:
    if not (ids := decode_ids(raw, limits.tokens, param)):
        raise RequestError(f"`{param}` has an empty list of token ids; give at least one token", param=param)
    largest = int(np.frombuffer(ids, np.uint32).max())
    if limits.vocabulary is not None and largest >= limits.vocabulary:
        text = f"`{param}` has the token id {largest}; those of the model are below {limits.vocabulary}"
        raise RequestError(text, param=param)
    return ids


def decode_ids(raw: Raw, most_tokens: float, param: str) -> PackedTokens:
    """Return a list of token ids, packed. A long one is decoded in pieces, so that other threads get their turn.

    Raises: RequestError. PromptTooLong: it has surely more than `most_tokens`.
    """
    encoded = bytes(raw).strip()
    if not encoded.startswith(b"["):
        decoded(_IDS, raw, param)
    most = len(encoded) // 2  # each has a digit and a comma or bracket
    if most > most_tokens and (count := encoded.count(b",") + 1) > most_tokens:
        raise prompt_too_long(count, most_tokens)
    if len(encoded) <= _PIECE_BYTES:
        return _ids(encoded[1:-1].strip(), param)
    try:
        return PackedTokens(b"".join(map(_ids, _pieces(encoded))))
    except RequestError as error:
        raise RequestError(f"`{param}` has something else than token ids", param=param) from error


def _ids(inside: bytes, param: str | None = None) -> PackedTokens:
    """Return the token ids of the inside of a valid JSON list, packed. Raises: RequestError: it has others.

    numpy makes no object of each number. It stops at what is no integer, so such lists go to the JSON decoder.
    """
    if inside and not any(mark in inside for mark in _IN_NO_INTEGER):
        found = np.fromstring(inside, np.int64, sep=",").view(np.uint64)  # negative ones are the largest
        if found.max() < _ANY_ID:
            return PackedTokens(found.astype(np.uint32).tobytes())
    return pack_tokens(decoded(_IDS, b"[%b]" % inside, param))


def _pieces(encoded: bytes) -> Iterator[bytes]:
    """Cut the inside of a long list of numbers after `_PIECE_BYTES` or a few more."""
    inside = encoded[1:-1]
    start = 0
    while start < len(inside):
        end = inside.find(b",", start + _PIECE_BYTES)
        end = len(inside) if end < 0 else end
        yield inside[start:end]
        start = end + 1
