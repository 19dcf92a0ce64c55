"""The prompt that a caller asks about: token ids, or a client's request."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec import UNSET

from preble.core.types import pack_tokens
from preble.errors import RequestError
from preble.gateway.http.access import UNAUTHORIZED, KeyRing
from preble.prompts.endpoints import COMPLETIONS, MOST_TOKENS, Endpoint, Fields, endpoint_of
from preble.rules.callers import Caller
from preble.selection.schemas import DEFAULT, PromptRequest


class UnknownClientKey(RequestError):
    """The client's headers have a key that is not valid."""

    status = 401
    code = UNAUTHORIZED.code


class ClientRequest(NamedTuple):
    """A request as the serving room takes it. `body`: the client's bytes, or its fields where there are none."""

    endpoint: Endpoint
    headers: dict[bytes, bytes]
    body: bytes | Fields
    caller: Caller


def request_in(asked: PromptRequest, caller: Caller, keys: KeyRing) -> ClientRequest:
    """Return the request that a caller asks about.

    Raises: RequestError: there is no prompt, or two. UnknownClientKey.
    """
    headers = {name.lower().encode(): value.encode() for name, value in asked.headers.items()}
    if headers.keys() & {b"authorization", b"x-api-key"}:
        client = keys.caller(headers)
        if client is None:
            raise UnknownClientKey("the client's key in `headers` is not valid", param="headers")
        caller = client
    if (asked.token_ids is None) == (asked.path is None):
        raise RequestError("give either token_ids, or path and body of the client's request", param="token_ids")
    if asked.token_ids is not None:
        return ClientRequest(COMPLETIONS, headers, _fields(asked, asked.token_ids), caller)
    endpoint = endpoint_of(asked.path or "")
    if endpoint is None or asked.body is UNSET:
        raise RequestError("path and body are those of a POST to an engine, such as /v1/completions", param="path")
    return ClientRequest(endpoint, headers, body_in(asked), caller)


def _fields(asked: PromptRequest, token_ids: list[int]) -> Fields:
    if not token_ids:
        raise RequestError("token_ids is empty", param="token_ids")
    expected = asked.expected_output_tokens
    return Fields(
        model=asked.lora_name or (None if asked.model_name == DEFAULT else asked.model_name),
        prompts=[pack_tokens(token_ids)],
        max_output_tokens=None if expected is None else min(expected, MOST_TOKENS),
        cache_salt=asked.cache_salt,  # not the key's: whoever has the token ids makes the replica's request himself
    )


def body_in(asked: PromptRequest) -> bytes:
    """Return the client's body: a JSON object as it came, or a string's content. Raises: RequestError."""
    body = bytes(asked.body) if asked.body is not UNSET else b""
    try:
        return msgspec.json.decode(body, type=str).encode() if body[:1] == b'"' else body
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"body is not JSON: {error}", param="body") from error
