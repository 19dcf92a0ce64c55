"""The emulator's endpoints that generate: bodies to prompts, and the emulated engine's tokens to answers."""

from __future__ import annotations

import asyncio
import itertools
import struct
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import shake_128
from typing import Any
from uuid import uuid4

import msgspec

from preble.core.types import PackedTokens, pack_tokens, unpack_tokens
from preble.emulator.answers.content import Content, content_of
from preble.emulator.answers.forms import DONE, Answer, Chat, Completion
from preble.emulator.answers.other_forms import Generated, GeneratedTokens, MessageAnswer, Response
from preble.emulator.answers.placeholders import STAND_IN, EmulatedMedia
from preble.emulator.answers.protocol import (
    PAIR_FIELDS,
    EmbeddingBody,
    EmulatedChat,
    EmulatedCompletion,
    EmulatedGenerate,
    TokenizeBody,
    as_rendered,
    decode_body,
    decode_object,
    server_sent,
)
from preble.emulator.answers.tokenizer import EmulatedTokenizer
from preble.emulator.config import EmulatorConfig
from preble.emulator.engine import EmulatedEngine
from preble.emulator.generation import Generation, Prompt
from preble.emulator.kv.events import own_namespace
from preble.emulator.kv.sources import keep, with_kv
from preble.emulator.pairs.decoding import Decode
from preble.emulator.pairs.rooms import PairFailed, Prefill
from preble.emulator.web import EmulatorRequest
from preble.engines.media_marks import with_stand_ins
from preble.errors import RequestError, UnknownModel
from preble.prompts.chats.from_anthropic import chat_of_message
from preble.prompts.chats.from_responses import chat_of_response

LONG_TEXT = 20_000
"""Texts with this many characters are tokenized in a thread, so that the engine's clock does not stop."""
_DIMENSIONS = 64
_MOST_STORED = 1000


@dataclass(slots=True)
class Models:
    """What is served: a model and adapters on it."""

    base: str
    adapters: list[str] = field(default_factory=list)

    def require(self, model: str | None) -> None:
        """Raises: UnknownModel: it is neither."""
        if model not in (None, "", self.base, *self.adapters):
            raise UnknownModel(f"The model {model!r} does not exist; this replica serves {self.base!r}", param="model")


class Generating:
    """Answers requests to the endpoints that compute."""

    def __init__(
        self,
        config: EmulatorConfig,
        fingerprint: str,
        engines: Sequence[EmulatedEngine],
        tokenizer: EmulatedTokenizer,
        media: EmulatedMedia,
        models: Models,
        role: Prefill | Decode | None = None,
    ) -> None:
        self._role = role
        self._engines = engines
        self._turns = itertools.cycle(engines)
        self._tokenizer = tokenizer
        self._media = media
        self._models = models
        self._fingerprint = fingerprint
        self._default_output_tokens = config.default_output_tokens
        self._stored: dict[str, tuple[list[Any], Any]] = {}
        """Of each stored response, its messages and its body."""

    # --- endpoints ---

    async def completions(self, exchange: EmulatorRequest) -> None:
        body = decode_body(await exchange.read(), EmulatedCompletion)
        tokens = [await self._tokens_of(prompt) for prompt in body.prompts()]
        await self._generate(body, tokens, None, Completion, "cmpl-", exchange)

    async def chat(self, exchange: EmulatorRequest) -> None:
        await self._say(decode_body(await exchange.read(), EmulatedChat), Chat, "chatcmpl-", exchange)

    async def messages(self, exchange: EmulatorRequest) -> None:
        given = decode_object(await exchange.read())
        if not isinstance(given.get("max_tokens"), int):
            raise RequestError("max_tokens is missing", param="max_tokens")
        chat = chat_of_message(given) | {"max_tokens": given["max_tokens"], "stream": given.get("stream")}
        chat |= _pair_fields(given)
        await self._say(decode_body(msgspec.json.encode(chat), EmulatedChat), MessageAnswer, "msg_", exchange)

    async def count_tokens(self, exchange: EmulatorRequest) -> None:
        chat = chat_of_message(decode_object(await exchange.read()))
        ids = await self.ids_of(decode_body(msgspec.json.encode(chat), TokenizeBody))
        await exchange.json({"input_tokens": len(ids)})

    async def responses(self, exchange: EmulatorRequest) -> None:
        given = decode_object(await exchange.read())
        chat = chat_of_response(given)
        if (previous := given.get("previous_response_id")) is not None:
            earlier, answer = self._earlier(previous)
            chat["messages"] = [*earlier, *_said(answer), *chat["messages"]]
        chat |= {"max_tokens": given.get("max_output_tokens"), "stream": given.get("stream")}
        chat |= _pair_fields(given)
        body = decode_body(msgspec.json.encode(chat), EmulatedChat)
        answer = await self._say(body, Response, "resp_", exchange, add_special_tokens=True)
        if given.get("store", True) and answer is not None:
            self._stored[answer["id"]] = (chat["messages"], answer)
            if len(self._stored) > _MOST_STORED:
                del self._stored[next(iter(self._stored))]

    async def stored(self, exchange: EmulatorRequest) -> None:
        """Answer for a stored response: read, deleted or cancelled."""
        name, _, action = exchange.path.removeprefix("/v1/responses/").partition("/")
        _, answer = self._earlier(name)
        match exchange.method, action:
            case "GET", "":
                await exchange.json(answer)
            case "DELETE", "":
                del self._stored[name]
                await exchange.json({"id": name, "object": "response", "deleted": True})
            case "POST", "cancel":
                raise RequestError("only a response in the background can be cancelled")
            case _:
                raise _NotStored("there is no such path")

    def _earlier(self, name: str) -> tuple[list[Any], Any]:
        if name not in self._stored:
            raise _NotStored(f"Response with id {name!r} not found.")
        return self._stored[name]

    async def generate(self, exchange: EmulatorRequest) -> None:
        await self._generate_from_ids(Generated, "", exchange)

    async def tokens_in(self, exchange: EmulatorRequest) -> None:
        await self._generate_from_ids(GeneratedTokens, "gen-", exchange)

    async def embeddings(self, exchange: EmulatorRequest) -> None:
        """Answer with vectors, the same for the same tokens, that mean nothing. Takes the time of their prefill."""
        body = decode_body(await exchange.read(), EmbeddingBody)
        prompts = EmulatedCompletion(prompt=body.input, max_tokens=1, model=body.model)
        self._models.require(body.model)
        tokens = [await self._tokens_of(prompt) for prompt in prompts.prompts()]
        prefills = [Prompt(one, 1) for one in tokens]
        with self._chosen(exchange).generate(prefills) as generation, exchange.unless_gone():
            await _last(generation.pieces())
        size = body.dimensions or _DIMENSIONS
        vectors = [_vector(one, size) for one in tokens]
        shown = [_encoded(vector) if body.encoding_format == "base64" else vector for vector in vectors]
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(shown)]
        count = sum(len(unpack_tokens(one)) for one in tokens)
        usage = {"prompt_tokens": count, "total_tokens": count}
        model = body.model or self._models.base
        await exchange.json({"object": "list", "data": data, "model": model, "usage": usage})

    async def ids_of(self, body: TokenizeBody) -> list[int]:
        """Return token ids as `/tokenize` shows them. Raises: RequestError."""
        self._models.require(body.model)
        is_chat = body.prompt is None
        special = body.add_special_tokens if body.add_special_tokens is not None else not is_chat
        if not is_chat:
            return await self._encode(body.prompt or "", add_special_tokens=special)
        messages, _ = with_stand_ins(body.messages, self._models.base, stand_in=STAND_IN)
        return self._media.shown(await self._pieces(messages, body, add_special_tokens=special))

    # --- inside ---

    async def _say(
        self,
        body: EmulatedChat,
        form: type[Answer],
        prefix: str,
        exchange: EmulatorRequest,
        *,
        add_special_tokens: bool = False,
    ) -> Any:
        """Answer a chat, and return the whole answer. `add_special_tokens`: as vLLM does to responses."""
        messages, identifiers = with_stand_ins(body.messages, self._models.base, stand_in=STAND_IN)
        pieces = await self._pieces(messages, body, add_special_tokens=add_special_tokens)
        tokens = pack_tokens(self._media.computed(pieces, identifiers))
        return await self._generate(body, [tokens], content_of(body), form, prefix, exchange)

    async def _generate_from_ids(self, form: type[Answer], prefix: str, exchange: EmulatorRequest) -> None:
        body = decode_body(await exchange.read(), EmulatedGenerate).as_completion()
        tokens = [await self._tokens_of(prompt) for prompt in body.prompts()]
        await self._generate(body, tokens, None, form, prefix, exchange)

    async def _pieces(
        self, messages: Sequence[Any], body: EmulatedChat | TokenizeBody, *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Return token ids of a chat's texts, parted where a medium stands."""
        text = self._tokenizer.render_chat(messages, as_rendered(body))
        first, *others = text.split(STAND_IN)
        pieces = [await self._encode(first, add_special_tokens=add_special_tokens)]
        return pieces + [await self._encode(other, add_special_tokens=False) for other in others]

    async def _generate(
        self,
        body: EmulatedCompletion | EmulatedChat,
        tokens: list[PackedTokens],
        content: Content | None,
        form: type[Answer],
        prefix: str,
        exchange: EmulatorRequest,
    ) -> Any:
        """Answer, and return the whole answer, also of a stream."""
        self._models.require(body.model)
        output = None if content is None else self._tokenizer.pieces(content.text)
        count = body.limit or self._default_output_tokens
        is_whole = body.limit is None
        if output is not None:
            is_whole = len(output[0]) <= (body.limit or len(output[0]))
            count = len(output[0]) if is_whole else count
        namespace = own_namespace(body.model if body.model in self._models.adapters else "", body.cache_salt or "")
        seeds = range(body.num_choices)
        prompts = [Prompt(prompt, count, seed, namespace, output) for prompt in tokens for seed in seeds]
        tool = content.tool if content is not None else None
        answer = form(
            answer_id=prefix + (exchange.headers.get(b"x-request-id", b"").decode("latin-1") or uuid4().hex),
            model=body.model or self._models.base,
            created=int(time.time()),
            fingerprint=self._fingerprint,
            finish_reason="length" if not is_whole else "tool_calls" if tool is not None else "stop",
            num_choices=body.num_choices,
            num_sequences=len(prompts),
            tool=tool,
            logprobs=body.num_logprobs,
            include_usage=body.includes_usage,
        )
        try:
            with exchange.unless_gone():
                engine = self._chosen(exchange)
                async with self._generation(engine, prompts, body) as generation:
                    if body.stream:
                        await exchange.stream(answer.events(generation))
                        keep(engine, body.kv_transfer_params, prompts, exchange.headers, {})  # and nobody is told
                        return answer.streamed[-1] if answer.streamed else None
                    whole = await answer.whole(generation)
        except PairFailed as failure:
            await self._fail(failure, exchange, is_streamed=bool(body.stream))
            return None
        keep(engine, body.kv_transfer_params, prompts, exchange.headers, whole)
        await exchange.json(whole)
        return whole

    @asynccontextmanager
    async def _generation(
        self, engine: EmulatedEngine, prompts: Sequence[Prompt], body: EmulatedCompletion | EmulatedChat
    ) -> AsyncIterator[Generation]:
        if self._role is not None:
            async with self._role.generating(self._engines, engine, body, prompts) as generation:
                yield generation
            return
        async with with_kv(engine, body.kv_transfer_params, prompts) as given:
            with engine.generate(given) as generation:
                yield generation

    @staticmethod
    async def _fail(failure: PairFailed, exchange: EmulatorRequest, *, is_streamed: bool) -> None:
        """Send SGLang's error; a stream has begun before anything is known of it."""
        if not is_streamed:
            await exchange.json(failure.fields, failure.status)
            return

        async def events() -> AsyncGenerator[bytes, None]:
            yield server_sent(failure.event) + DONE

        await exchange.stream(events())

    def _chosen(self, exchange: EmulatorRequest) -> EmulatedEngine:
        """Return the rank that the request names, else the next in turn. Raises: RequestError: it is out of range."""
        rank = exchange.headers.get(b"x-data-parallel-rank", b"")
        if not rank.isdigit():
            return next(self._turns)
        if int(rank) >= len(self._engines):
            count = len(self._engines)
            raise RequestError(f"data_parallel_rank {int(rank)} is out of range [0, {count}).")
        return self._engines[int(rank)]

    async def _tokens_of(self, prompt: str | PackedTokens) -> PackedTokens:
        if isinstance(prompt, str):
            return pack_tokens(await self._encode(prompt, add_special_tokens=True))
        return prompt

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)


def _pair_fields(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in PAIR_FIELDS if name in given}


class _NotStored(RequestError):
    status = 404
    code = "not_found"


async def _last(pieces: Any) -> None:
    async for _ in pieces:
        pass


def _said(answer: Any) -> list[Any]:
    """Return the messages of an earlier answer's texts; its tool calls are left out, as vLLM does."""
    texts = ["".join(part["text"] for part in item["content"]) for item in answer["output"] if "content" in item]
    return [{"role": "assistant", "content": text} for text in texts]


def _vector(tokens: PackedTokens, size: int) -> list[float]:
    raw = shake_128(tokens).digest(2 * size)
    values = [(number - 32768) / 32768 for number in struct.unpack(f"<{size}H", raw)]
    norm = sum(value * value for value in values) ** 0.5 or 1.0
    return [value / norm for value in values]


def _encoded(vector: list[float]) -> str:
    return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
