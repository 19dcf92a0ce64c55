"""What SGLang needs in the bodies of requests, and what they ask of it."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec
from msgspec import Raw

from preble.engines.json_fields import add_fields_before

GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/generate", "/invocations"})
"""Paths whose bodies take the id of a request. SGLang refuses one for a list of texts to embed."""


_OF_STREAMS = frozenset({"stream", "stream_options"})


class _IdFields(msgspec.Struct):
    """What decides whether one request id fits a body."""

    prompt: Raw = Raw(b'""')
    n: int | None = None
    best_of: int | None = None
    rid: Raw | None = None


class _AdapterFields(msgspec.Struct):
    """What says which adapter a body asks for."""

    model: Any = None
    lora_path: Raw | None = None


def with_adapter(body: bytes, adapters: Container[str]) -> bytes:
    """Return the same JSON body, with the adapter apart if its model is one of these.

    >>> with_adapter(b'{"model": "sql", "prompt": "x"}', ("sql",))
    b'{"lora_path":"sql","model": "sql", "prompt": "x"}'
    """
    if not adapters:
        return body
    try:
        named = msgspec.json.decode(body, type=_AdapterFields)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return body
    if not isinstance(named.model, str) or named.model not in adapters or named.lora_path is not None:
        return body
    return add_fields_before(body, {"lora_path": named.model})


def with_request_id(body: bytes, request_id: str) -> bytes | None:
    """Return the same JSON body with this `rid`; None where it has one, or asks for several answers: they need several
    ids.

    >>> with_request_id(b'{"prompt": [1, 2]}', "a"), with_request_id(b'{"prompt": ["x", "y"]}', "a")
    (b'{"rid":"a","prompt": [1, 2]}', None)
    """
    try:
        shape = msgspec.json.decode(body, type=_IdFields)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if (
        shape.rid is not None
        or (shape.n or 1) > 1
        or (shape.best_of or 1) > 1
        or _is_list_of_prompts(bytes(shape.prompt))
    ):
        return None
    return None if body.lstrip()[1:].lstrip().startswith(b"}") else add_fields_before(body, {"rid": request_id})


class _Several(msgspec.Struct):
    """What decides how many answers a body asks for."""

    n: Any = None
    best_of: Any = None
    sampling_params: Any = None


def num_answers(body: bytes) -> int:
    """Return how many answers a body asks for to one prompt; 1 where it is not what SGLang takes.

    >>> num_answers(b'{"prompt": "x", "n": 2}'), num_answers(b'{"text": "x", "sampling_params": {"n": 1}}')
    (2, 1)
    >>> num_answers(b'{"text": ["x"], "sampling_params": [{"n": 2}]}')
    2
    """
    try:
        asked = msgspec.json.decode(body, type=_Several)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return 1
    given = asked.sampling_params if isinstance(asked.sampling_params, list) else [asked.sampling_params]
    sampling = [one for one in given if isinstance(one, dict)]
    numbers = (asked.n, asked.best_of, *(one.get("n") for one in sampling))
    return max([1, *(number for number in numbers if isinstance(number, int))])


def without_stream(body: bytes) -> bytes:
    """Return the same request for an answer that comes whole.

    >>> without_stream(b'{"prompt":"x","stream":true,"stream_options":{}}')
    b'{"prompt":"x"}'
    """
    if b'"stream' not in body:
        return body
    try:
        fields = msgspec.json.decode(body, type=dict[str, Raw])
    except (msgspec.DecodeError, UnicodeError, RecursionError):  # SGLang says what is wrong
        return body
    return msgspec.json.encode({name: value for name, value in fields.items() if name not in _OF_STREAMS})


def _is_list_of_prompts(prompt: bytes) -> bool:
    """Return whether these are several prompts; one is a text or a list of token ids."""
    return prompt.startswith(b"[") and prompt[1:].lstrip()[:1] in (b'"', b"[")
