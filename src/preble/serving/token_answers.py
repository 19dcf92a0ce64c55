"""`/tokenize` and `/detokenize`, answered with the gateway's own tokenizer, as vLLM answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from msgspec import Raw, Struct

from preble.core.types import unpack_tokens
from preble.prompts.endpoints import Endpoint
from preble.prompts.endpoints.bodies import decode_ids, decode_text, decoded
from preble.prompts.tokens import TokenSource
from preble.prompts.tokens.tokenizer import find_model_files
from preble.serving.replicas.live import LiveReplicas

_AT_ONCE_BYTES = 128 * 1024
_MEDIA = (b'"image', b'"video', b'"audio', b'"input_image', b'"input_audio', b'"file')


class _TokensWanted(Struct):
    """vLLM's two forms in one: `prompt` or `messages`."""

    model: str | None = None
    prompt: Raw = Raw(b"")
    messages: Raw = Raw(b"")
    add_special_tokens: bool = True
    return_token_strs: bool | None = None
    chat_template: str | None = None


class _TextWanted(Struct):
    tokens: Raw
    model: str | None = None


_TOKENIZE, _DETOKENIZE = msgspec.json.Decoder(_TokensWanted), msgspec.json.Decoder(_TextWanted)


class TokenAnswers:
    """Answers what the gateway's tokenizer can; the rest, such as chats with pictures, is for the replicas."""

    def __init__(self, tokenizer: str, tokens: TokenSource, replicas: LiveReplicas) -> None:
        self._name = tokenizer
        self._tokens = tokens
        self._replicas = replicas
        self._detokenizer: tokenizers.Tokenizer | None = None

    async def answer(self, endpoint: Endpoint, body: bytes) -> bytes | None:
        """Return the answer to a body, None if a replica should give it.

        Raises: RequestError: the body is wrong. PromptTooLong: it has more ids than a replica makes. NoReplicaError,
        UnknownModel: nobody serves its model.
        """
        answer = await (self._text(body) if endpoint.path.endswith("detokenize") else self._ids(body))
        return None if answer is None else await _beside(len(body), msgspec.json.encode, answer)

    async def _ids(self, body: bytes) -> dict[str, Any] | None:
        given: _TokensWanted = await _beside(len(body), decoded, _TOKENIZE, body)
        is_chat = bytes(given.messages) not in (b"", b"null")
        if given.return_token_strs or given.chat_template or is_chat == bool(given.prompt):
            return None
        if is_chat and any(word in body for word in _MEDIA):
            return None
        model = given.model or None
        engine = self._replicas.check_model(model).engine
        if is_chat:
            packed = await self._tokens.chat(body, model, engine=engine)
        else:
            packed = await self._tokens.completion(decode_text(given.prompt), given.add_special_tokens, model)
        ids = list(unpack_tokens(packed))
        return {"count": len(ids), "max_model_len": next(self._limits(model), None), "tokens": ids, "token_strs": None}

    def _limits(self, model: str | None) -> Iterator[int | None]:
        """Yield the longest sequence that each replica of the model makes."""
        return (r.info.max_model_len for r in self._replicas.values() if model is None or model in r.info.models)

    async def _text(self, body: bytes) -> dict[str, Any]:
        given: _TextWanted = await _beside(len(body), decoded, _DETOKENIZE, body)
        self._replicas.check_model(model := given.model or None)
        longest = max((limit or inf for limit in self._limits(model)), default=inf)
        ids = await _beside(len(body), decode_ids, given.tokens, longest, "tokens")
        if self._detokenizer is None:
            self._detokenizer = await asyncio.to_thread(_loaded, self._name)
        decode = self._detokenizer.decode_batch
        [text] = await asyncio.to_thread(lambda: decode([unpack_tokens(ids)], skip_special_tokens=False))
        return {"prompt": text}


async def _beside(num_bytes: int, work: Callable[..., Any], *arguments: object) -> Any:
    """Do work on a body of this size; on a large one in another thread, so that the event loop goes on."""
    return work(*arguments) if num_bytes <= _AT_ONCE_BYTES else await asyncio.to_thread(work, *arguments)


def _loaded(name: str) -> tokenizers.Tokenizer:
    folder: Path = find_model_files(name)
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
