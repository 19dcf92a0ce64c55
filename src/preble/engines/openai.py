"""The client of any OpenAI-compatible server: requests pass through, the cache stays in the dark."""

from __future__ import annotations

from typing import Annotated

import msgspec

from preble.core.types import ReplicaSpec
from preble.engines.adapter import Engine, EngineInfo, ModelNames
from preble.engines.http import HttpClient
from preble.errors import EngineProtocolError, RequestError

_MOST_NAME_CHARS = 4096
"""The longest name of a model: a path may be one. Names are in logs, metrics and errors."""
_ModelName = Annotated[str, msgspec.Meta(max_length=_MOST_NAME_CHARS)]


class ModelCard(msgspec.Struct):
    """One entry of `/v1/models`. `parent` is the base model of an adapter, `root` what the engine was started with."""

    id: _ModelName
    parent: _ModelName | None = None
    root: _ModelName | None = None
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


class Version(msgspec.Struct):
    """What a gateway answers at `/version`; another server has no `server`."""

    server: str | None = None


GATEWAY = "preble"
"""The `server` of a Preble gateway's `/version`."""


class OpenAIEngine(Engine):
    """The client of one replica that is known by OpenAI's API alone."""

    async def probe(self) -> EngineInfo:
        """Ask for the models. Raises: EngineError."""
        models = await served_models(self.http)
        max_model_len = models[0].max_model_len
        return EngineInfo(
            engine="openai",
            models=tuple(model.id for model in models),
            spec=ReplicaSpec(self.replica_id, max_prompt_tokens=max_model_len),
            max_model_len=max_model_len,
            adapters=adapters_among(models),
            roots=roots_of(models),
        )

    async def check_ready(self) -> None:
        """Return if the replica answers now. Raises: EngineError."""
        (await self.http.ask("/v1/models")).require_ok()

    async def models(self) -> ModelNames:
        models = await served_models(self.http)
        return ModelNames(tuple(model.id for model in models), adapters_among(models), roots_of(models))

    async def tokenize(self, body: bytes) -> list[int]:
        """Return token ids by the server's `/tokenize`, which vLLM, SGLang and others have though OpenAI has not.

        Raises: EngineRefused: it has none. EngineError. RequestError: the engine says that the body is wrong.
        """
        answer = await self.http.ask("/tokenize", body)
        if answer.status in (404, 405, 501):
            return await super().tokenize(body)
        if 400 <= answer.status < 500 and answer.status not in (401, 403, 408, 429):
            raise request_error(answer.content)
        return answer.decode(TokenIds).tokens


async def is_gateway(http: HttpClient) -> bool:
    """Return whether another Preble gateway answers there. Raises: EngineError: nobody does."""
    answer = await http.ask("/version")
    try:
        return answer.status == 200 and answer.decode(Version).server == GATEWAY
    except EngineProtocolError:
        return False


async def served_models(http: HttpClient) -> list[ModelCard]:
    """Return the models served, base models first. Never empty. Raises: EngineError."""
    models: list[ModelCard] = (await http.ask("/v1/models")).decode(ModelList).data
    if not models:
        raise http.error(EngineProtocolError, "serves no model: its /v1/models is empty")
    return sorted(models, key=lambda model: model.parent is not None)


def adapters_among(models: list[ModelCard]) -> tuple[str, ...]:
    """Return the names of those that are adapters on another model."""
    return tuple(model.id for model in models if model.parent is not None)


def roots_of(models: list[ModelCard]) -> tuple[str, ...]:
    """Return what each was loaded from; its name where the engine does not say."""
    return tuple(model.root or model.id for model in models)


def request_error(content: bytes) -> RequestError:
    """Return what an engine says of a body that it does not like, as the client may see it."""
    try:
        body = msgspec.json.decode(content, type=ErrorBody)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        body = ErrorBody()
    detail = body.error or ErrorDetail()
    message = detail.message or body.message or "the engine cannot tokenize this request"
    return RequestError(message, param=detail.param)
