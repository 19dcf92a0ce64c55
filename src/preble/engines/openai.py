"""The client of any OpenAI-compatible server: requests pass through, the cache stays in the dark."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Annotated

import msgspec

from preble.core.types import KvEvent, ReplicaId, ReplicaSpec
from preble.engines.adapter import EngineInfo, EngineLoad, EngineResponse
from preble.engines.http import HttpClient
from preble.errors import EngineProtocolError, EngineRefused, RequestError


class ModelCard(msgspec.Struct):
    """One entry of `/v1/models`. `parent` is the base model of an adapter."""

    id: str
    parent: str | None = None
    owned_by: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]


class TokenIds(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]


class ErrorDetail(msgspec.Struct):
    message: str | None = None
    param: str | None = None


class ErrorBody(msgspec.Struct):
    """An error in OpenAI's form, or vLLM's older flat one."""

    error: ErrorDetail | None = None
    message: str | None = None


class OpenAIEngine:
    """The client of one replica that is known by OpenAI's API alone."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    @property
    def replica_id(self) -> ReplicaId:
        return self._http.replica_id

    @property
    def url(self) -> str:
        return self._http.url

    async def probe(self) -> EngineInfo:
        """Ask for the models. Raises: EngineError."""
        models = await self._models()
        max_model_len = models[0].max_model_len
        return EngineInfo(
            engine="openai",
            models=tuple(model.id for model in models),
            spec=ReplicaSpec(self.replica_id, max_prompt_tokens=max_model_len),
            max_model_len=max_model_len,
            adapters=adapters_among(models),
        )

    async def owner(self) -> str | None:
        """Whom its first model is owned by: most programs give their own name. Raises: EngineError."""
        return (await self._models())[0].owned_by

    async def _models(self) -> list[ModelCard]:
        """The models served, base models first. Never empty. Raises: EngineError."""
        answer = await self._http.ask("/v1/models")
        models: list[ModelCard] = answer.decode(ModelList).data
        if not models:
            raise self._http.error(EngineProtocolError, "serves no model: its /v1/models is empty")
        return sorted(models, key=lambda model: model.parent is not None)

    async def check_ready(self) -> None:
        """Return if the replica answers now. Raises: EngineError."""
        (await self._http.ask("/v1/models")).require_ok()

    def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> AbstractAsyncContextManager[EngineResponse]:
        return self._http.send(path, body, headers)

    async def tokenize(self, body: bytes) -> list[int]:
        """Token ids by the server's `/tokenize`, which vLLM, SGLang and others have though OpenAI has not.

        Raises: EngineRefused: it has none. EngineError. RequestError: the engine says that the body is wrong.
        """
        answer = await self._http.ask("/tokenize", body)
        if answer.status in (404, 405, 501):
            raise self._http.error(EngineRefused, "has no /tokenize; give the gateway a tokenizer (--tokenizer)")
        if 400 <= answer.status < 500 and answer.status not in (401, 403, 408, 429):
            raise request_error(answer.content)
        return answer.decode(TokenIds).tokens

    def kv_events(self) -> AsyncIterator[KvEvent] | None:
        return None

    def resync_kv_events(self) -> None:
        """There are none."""

    def loads(self) -> AsyncIterator[EngineLoad | None] | None:
        return None

    async def close(self) -> None:
        await self._http.close()


def adapters_among(models: list[ModelCard]) -> tuple[str, ...]:
    """The names of those that are adapters on another model."""
    return tuple(model.id for model in models if model.parent is not None)


def request_error(content: bytes) -> RequestError:
    """What an engine says of a body that it does not like, as the client may see it."""
    try:
        body = msgspec.json.decode(content, type=ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = ErrorBody()
    detail = body.error or ErrorDetail()
    message = detail.message or body.message or "the engine cannot tokenize this request"
    return RequestError(message, param=detail.param)
