"""From a decoded body to a relay: a request is given an id, admitted, tokenized and made ready to be placed."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from preble.config import LimitsConfig
from preble.core.types import TOKEN_BYTES, PackedTokens, Request, RequestId
from preble.errors import Overloaded, RequestError
from preble.gateway.http.client import Client
from preble.gateway.requests.relay import Relay
from preble.serving.api import (
    CHAT,
    COMPLETIONS,
    ChatBody,
    CompletionBody,
    Prompt,
    decode_chat,
    decode_completion,
    decode_prompts,
)
from preble.serving.dispatcher import Dispatcher
from preble.serving.telemetry.metrics import Telemetry
from preble.serving.tokens.pool import TokenSource

_SANE_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
_PASSED_TO_ENGINE = (b"traceparent", b"tracestate")


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One client's request, decoded. `prompts`: of a completion; a chat has none here, its messages stay in `body`."""

    path: str
    body: bytes
    request_id: str
    engine_headers: Mapping[str, str]
    fields: CompletionBody | ChatBody
    prompts: list[Prompt]

    @property
    def max_output_tokens(self) -> int | None:
        limit = self.fields.max_tokens
        if isinstance(self.fields, ChatBody) and self.fields.max_completion_tokens is not None:
            limit = self.fields.max_completion_tokens
        return limit if limit is None or limit > 0 else None


class Intake:
    """The way in, the same for every kind of request. Knows how many prompts are inside."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokens: TokenSource,
        telemetry: Telemetry,
        limits: LimitsConfig,
        *,
        forward_authorization: bool = False,
    ) -> None:
        self._dispatcher = dispatcher
        self._tokens = tokens
        self._telemetry = telemetry
        self._limits = limits
        self._forward_authorization = forward_authorization
        self._ids: set[str] = set()
        self._numbers = count()
        self._id_prefix = secrets.token_hex(4)
        self._admitted = 0

    @property
    def num_admitted(self) -> int:
        """Prompts between admission and the end of their answer."""
        return self._admitted

    def decoded(self, path: str, client: Client, body: bytes, request_id: str) -> ParsedRequest:
        """Raises: RequestError."""
        fields: CompletionBody | ChatBody
        prompts: list[Prompt] = []
        if path == COMPLETIONS:
            fields = decode_completion(body)
            prompts, _ = decode_prompts(fields.prompt)
        else:
            fields = decode_chat(body)
        return ParsedRequest(path, body, request_id, self._engine_headers(client, request_id), fields, prompts)

    def _engine_headers(self, client: Client, request_id: str) -> dict[str, str]:
        headers = {"content-type": "application/json", "x-request-id": request_id}
        for name in _PASSED_TO_ENGINE:
            if (value := client.headers.get(name)) is not None:
                headers[name.decode()] = value.decode("latin-1")
        if self._forward_authorization and (value := client.headers.get(b"authorization")) is not None:
            headers["authorization"] = value.decode("latin-1")
        return headers

    @contextmanager
    def request_id(self, client: Client) -> Iterator[str]:
        """The client's own request id where it gave a sane one that is not in use, else a new one."""
        own = client.headers.get(b"x-request-id", b"")
        request_id = own.decode() if _SANE_ID.fullmatch(own) else f"{self._id_prefix}-{next(self._numbers):x}"
        if request_id in self._ids:
            request_id = f"{request_id}-{self._id_prefix}-{next(self._numbers):x}"
        client.request_id = request_id
        self._ids.add(request_id)
        try:
            yield request_id
        finally:
            self._ids.discard(request_id)

    @contextmanager
    def admission(self, num_prompts: int) -> Iterator[None]:
        """Raises: Overloaded: there is no room now. RequestError: there never is."""
        room = self._limits.max_in_flight
        if num_prompts > room:
            raise RequestError(f"`prompt` has {num_prompts} prompts; at most {room} are accepted", param="prompt")
        if self._admitted + num_prompts > room:
            raise Overloaded(
                f"{self._admitted} prompts are being served, which is the limit; try again soon",
                retry_after_s=self._limits.retry_after_s,
            )
        self._admitted += num_prompts
        self._telemetry.waiting.inc(num_prompts)
        try:
            yield
        finally:
            self._admitted -= num_prompts
            self._telemetry.waiting.dec(num_prompts)

    async def relay(self, parsed: ParsedRequest, index: int = 0, body: bytes | None = None) -> Relay:
        """The relay for one prompt of the request, tokenized. `body`: what the replica gets, the client's unless given.

        Raises: RequestError: it cannot be tokenized. NoReplicaError.
        """
        fields = parsed.fields
        tokens = await self._token_ids(parsed, index)
        if fields.truncate_prompt_tokens is not None and fields.truncate_prompt_tokens > 0:
            tokens = PackedTokens(tokens[-fields.truncate_prompt_tokens * TOKEN_BYTES :])
        request = Request(
            RequestId(parsed.request_id if body is None else f"{parsed.request_id}#{index}"),
            tokens,
            parsed.max_output_tokens,
            self._dispatcher.namespace(fields.model, fields.cache_salt),
        )
        sent = parsed.body if body is None else body
        return Relay(
            self._dispatcher,
            self._telemetry,
            request,
            fields.model,
            parsed.path,
            sent,
            parsed.engine_headers,
            max_answer_bytes=self._limits.max_answer_bytes,
        )

    async def _token_ids(self, parsed: ParsedRequest, index: int) -> PackedTokens:
        fields = parsed.fields
        self._dispatcher.check_model(fields.model)
        started = time.perf_counter()
        if parsed.path == CHAT:
            tokens = await self._tokens.chat(parsed.body, fields.model)
        elif isinstance(prompt := parsed.prompts[index], str):
            tokens = await self._tokens.completion(prompt, fields.add_special_tokens, fields.model)
        else:
            return prompt
        self._telemetry.tokenizing.observe(time.perf_counter() - started)
        return tokens
