"""A client's request: its id, and the fields of its body that placing needs."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from math import inf

from preble.core.types import TOKEN_BYTES, PackedTokens
from preble.serving.bodies import (
    COMPLETIONS,
    ChatBody,
    CompletionBody,
    Prompt,
    PromptLimits,
    decode_chat,
    decode_completion,
    decode_prompts,
    with_cache_salt,
)
from preble.serving.callers import ANYBODY, Caller

_SANE_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One client's request. `body`: for the replica. `prompts`: of a completion; a chat has messages instead.

    `headers`: with names in lower case.
    """

    path: str
    headers: Mapping[bytes, bytes]
    body: bytes
    request_id: str
    fields: CompletionBody | ChatBody
    prompts: list[Prompt]
    caller: Caller = ANYBODY

    @property
    def model(self) -> str | None:
        """The model that the client named, None if it named none."""
        return self.fields.model

    @property
    def num_prompts(self) -> int:
        """How many placements the request needs."""
        return max(1, len(self.prompts))

    @property
    def max_output_tokens(self) -> int | None:
        limit = self.fields.max_tokens
        if isinstance(self.fields, ChatBody) and self.fields.max_completion_tokens is not None:
            limit = self.fields.max_completion_tokens
        return limit if limit is None or limit > 0 else None

    def truncated(self, tokens: PackedTokens) -> PackedTokens:
        """Return the end of a prompt that is left after `truncate_prompt_tokens`."""
        limit = self.fields.truncate_prompt_tokens
        return PackedTokens(tokens[-limit * TOKEN_BYTES :]) if limit is not None and limit > 0 else tokens


def parse_request(
    path: str,
    headers: Mapping[bytes, bytes],
    body: bytes,
    request_id: str,
    limits: PromptLimits,
    caller: Caller = ANYBODY,
    *,
    salts: bool = False,
) -> ParsedRequest:
    """`salts`: whether the caller's cache salt can go to the replicas.

    Raises: RequestError: the body is not what the path takes, or is surely over a limit.
    """
    fields: CompletionBody | ChatBody
    prompts: list[Prompt] = []
    if path == COMPLETIONS:
        fields = decode_completion(body)
        if fields.truncate_prompt_tokens is not None:
            limits = PromptLimits(limits.prompts, inf)
        prompts = decode_prompts(fields.prompt, limits)
    else:
        fields = decode_chat(body)
    salt = caller.cache_salt(fields.cache_salt)
    if salt != fields.cache_salt:
        fields.cache_salt = salt
        body = with_cache_salt(body, salt) if salts and salt else body
    return ParsedRequest(path, headers, body, request_id, fields, prompts, caller)


class RequestIds:
    """The ids of the requests that are being served, each once."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._numbers = count()
        self._prefix = secrets.token_hex(4)

    @contextmanager
    def take(self, headers: Mapping[bytes, bytes]) -> Iterator[str]:
        """Yield the client's `x-request-id` if it is short, printable and not in use, else a new id."""
        own = headers.get(b"x-request-id", b"")
        request_id = own.decode() if _SANE_ID.fullmatch(own) else f"{self._prefix}-{next(self._numbers):x}"
        if request_id in self._used:
            request_id = f"{request_id}-{self._prefix}-{next(self._numbers):x}"
        self._used.add(request_id)
        try:
            yield request_id
        finally:
            self._used.discard(request_id)
