"""The emulated replica's HTTP interface: plain ASGI, vLLM's endpoints."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
import structlog

import preble
from preble.core.types import PackedTokens, pack_tokens
from preble.engines.emulator.answers import Answer
from preble.engines.emulator.config import EmulatorConfig
from preble.engines.emulator.engine import EmulatedEngine, Prompt
from preble.engines.emulator.events import KvEventPublisher, event_source, own_namespace
from preble.engines.emulator.media import STAND_IN, EmulatedMedia
from preble.engines.emulator.metrics import MetricsPage
from preble.engines.emulator.protocol import (
    AdapterBody,
    ChatBody,
    CompletionBody,
    TokenizeBody,
    decode_body,
    error_body,
)
from preble.engines.emulator.tokenizer import EmulatedTokenizer, Message
from preble.engines.media import with_stand_ins
from preble.errors import BodyTooLarge, RequestError, UnknownModel

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Result = TypeVar("Result")
Handler = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]

MAX_BODY_BYTES = 32 * 2**20
LONG_TEXT = 20_000
"""Characters from which a text is tokenized in a thread, so that the engine's clock is not held up."""

_log = structlog.get_logger("preble.engines.emulator")


class EmulatorApp:
    """ASGI application of one emulated replica."""

    def __init__(
        self,
        config: EmulatorConfig,
        profile: str,
        engines: Sequence[EmulatedEngine],
        tokenizer: EmulatedTokenizer,
        media: EmulatedMedia,
        publishers: Sequence[KvEventPublisher],
    ) -> None:
        """`engines`: one for each data-parallel rank. `publishers`: as many, or none."""
        self._engines = engines
        self._turns = itertools.cycle(engines)
        self._tokenizer = tokenizer
        self._media = media
        self._publishers = publishers
        self._model = config.model or profile
        self._adapters: list[str] = []
        self._fingerprint = f"preble-emulator/{profile}"
        self._default_output_tokens = config.default_output_tokens
        self._topic = config.events_topic
        self._metrics = MetricsPage(engines, self._model, config.metrics_block_size or config.block_size)
        self._headers = [(b"x-preble-emulated", profile.encode())]
        self._routes: Mapping[tuple[str, str], Handler] = {
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/load_lora_adapter"): self._load_adapter,
            ("POST", "/v1/unload_lora_adapter"): self._unload_adapter,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._show_metrics,
            ("GET", "/kv_event_sources"): self._kv_event_sources,
            ("GET", "/version"): self._version,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._routes.get((scope["method"], scope["path"]))
        if handler is None:
            await self._refuse(scope, send)
            return
        try:
            await handler(scope, receive, send)
        except RequestError as error:
            await self._json(send, error_body(str(error), error.code, error.param), error.status)
        except ClientGone:
            _log.debug("client_gone", path=scope["path"])

    async def _refuse(self, scope: Scope, send: Send) -> None:
        is_known = any(path == scope["path"] for _, path in self._routes)
        status, code = (405, "method_not_allowed") if is_known else (404, "not_found")
        said = f"{scope['method']} {scope['path']} is not served by an emulated replica"
        await self._json(send, error_body(said, code, None), status)

    # --- generating ---

    async def _completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = decode_body(await read_body(receive), CompletionBody)
        self._require_model(body.model)
        tokens = [await self._tokens_of(prompt) for prompt in body.prompts()]
        await self._generate(body, tokens, scope, receive, send)

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = decode_body(await read_body(receive), ChatBody)
        self._require_model(body.model)
        messages, identifiers = with_stand_ins(body.messages, self._model, stand_in=STAND_IN)
        pieces = await self._pieces(messages, body, add_special_tokens=False)
        await self._generate(body, [pack_tokens(self._media.computed(pieces, identifiers))], scope, receive, send)

    async def _pieces(
        self, messages: Sequence[Message], body: ChatBody | TokenizeBody, *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Token ids of a chat's texts, parted where a medium stands."""
        text = self._tokenizer.render_chat(messages, body.tools or [], add_generation_prompt=body.add_generation_prompt)
        first, *others = text.split(STAND_IN)
        pieces = [await self._encode(first, add_special_tokens=add_special_tokens)]
        return pieces + [await self._encode(other, add_special_tokens=False) for other in others]

    async def _generate(
        self, body: CompletionBody | ChatBody, tokens: list[PackedTokens], scope: Scope, receive: Receive, send: Send
    ) -> None:
        output_tokens = body.limit or self._default_output_tokens
        namespace = own_namespace(body.model if body.model in self._adapters else "", body.cache_salt or "")
        prompts = [
            Prompt(prompt, output_tokens, seed, namespace) for prompt in tokens for seed in range(body.num_choices)
        ]
        answer = self._answer(body, len(prompts), scope)
        with self._chosen(scope).generate(prompts) as generation:
            if body.stream:
                work = self._stream(answer.events(generation, include_usage=body.includes_usage), send)
                await unless_gone(receive, work)
                return
            whole = await unless_gone(receive, answer.whole(generation))
        await self._json(send, whole)

    def _chosen(self, scope: Scope) -> EmulatedEngine:
        """The rank that the request names, else the next in turn. Raises: RequestError: it is out of range."""
        rank = dict(scope["headers"]).get(b"x-data-parallel-rank", b"")
        if not rank.isdigit():
            return next(self._turns)
        if int(rank) >= len(self._engines):
            count = len(self._engines)
            raise RequestError(f"data_parallel_rank {int(rank)} is out of range [0, {count}).")
        return self._engines[int(rank)]

    def _answer(self, body: CompletionBody | ChatBody, num_sequences: int, scope: Scope) -> Answer:
        is_chat = isinstance(body, ChatBody)
        request_id = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1") or uuid4().hex
        return Answer(
            answer_id=f"chatcmpl-{request_id}" if is_chat else f"cmpl-{request_id}",
            model=body.model or self._model,
            created=int(time.time()),
            fingerprint=self._fingerprint,
            is_chat=is_chat,
            finish_reason="length" if body.limit else "stop",
            num_choices=body.num_choices,
            num_sequences=num_sequences,
        )

    def _require_model(self, model: str | None) -> None:
        if model not in (None, "", self._model, *self._adapters):
            raise UnknownModel(
                f"The model {model!r} does not exist; this replica serves {self._model!r}", param="model"
            )

    async def _tokens_of(self, prompt: str | PackedTokens) -> PackedTokens:
        if isinstance(prompt, str):
            return pack_tokens(await self._encode(prompt, add_special_tokens=True))
        return prompt

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)

    # --- the small endpoints ---

    async def _tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = decode_body(await read_body(receive), TokenizeBody)
        self._require_model(body.model)
        is_chat = body.prompt is None
        special = body.add_special_tokens if body.add_special_tokens is not None else not is_chat
        if is_chat:
            messages, _ = with_stand_ins(body.messages, self._model, stand_in=STAND_IN)
            ids = self._media.shown(await self._pieces(messages, body, add_special_tokens=special))
        else:
            ids = await self._encode(body.prompt or "", add_special_tokens=special)
        answer = {"count": len(ids), "max_model_len": self._engines[0].max_model_len, "tokens": ids, "token_strs": None}
        await self._json(send, answer)

    async def _reset_prefix_cache(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._json(send, {"success": all([await engine.reset_cache() for engine in self._engines])})

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        card = {
            "id": self._model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "preble-emulator",
            "root": self._model,
            "parent": None,
            "max_model_len": self._engines[0].max_model_len,
        }
        adapters = [{**card, "id": name, "root": name, "parent": self._model} for name in self._adapters]
        await self._json(send, {"object": "list", "data": [card, *adapters]})

    async def _load_adapter(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = decode_body(await read_body(receive), AdapterBody).lora_name
        if name in (self._model, *self._adapters):
            raise RequestError(f"The lora adapter {name!r} has already been loaded.", param="lora_name")
        self._adapters.append(name)
        await self._send(send, f"Success: LoRA adapter '{name}' added successfully.".encode(), b"text/plain")

    async def _unload_adapter(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = decode_body(await read_body(receive), AdapterBody).lora_name
        if name not in self._adapters:
            raise UnknownModel(f"The lora adapter {name!r} cannot be found.", param="lora_name")
        self._adapters.remove(name)
        await self._send(send, f"Success: LoRA adapter '{name}' removed successfully.".encode(), b"text/plain")

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._send(send, b"", b"text/plain")

    async def _show_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._send(send, self._metrics.render(), b"text/plain; version=0.0.4; charset=utf-8")

    async def _kv_event_sources(self, scope: Scope, receive: Receive, send: Send) -> None:
        sources = [publisher.source() for publisher in self._publishers] or [event_source(None, None, self._topic)]
        await self._json(send, {str(rank): source for rank, source in enumerate(sources)})

    async def _version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._json(send, {"version": f"{preble.__version__}+preble-emulator"})

    # --- sending ---

    async def _stream(self, events: AsyncGenerator[bytes, None], send: Send) -> None:
        await self._start(send, 200, b"text/event-stream; charset=utf-8")
        async with aclosing(events):
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _json(self, send: Send, data: Any, status: int = 200) -> None:
        await self._send(send, msgspec.json.encode(data), b"application/json", status)

    async def _send(self, send: Send, body: bytes, content_type: bytes, status: int = 200) -> None:
        await self._start(send, status, content_type, (b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.body", "body": body})

    async def _start(self, send: Send, status: int, content_type: bytes, *more: tuple[bytes, bytes]) -> None:
        headers = [*self._headers, (b"content-type", content_type), *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


async def read_body(receive: Receive) -> bytes:
    """The whole request body. Raises: ClientGone, BodyTooLarge."""
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the request body is larger than {MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled as soon as the client goes away. Raises: ClientGone."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
