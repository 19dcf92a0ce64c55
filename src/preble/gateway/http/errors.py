"""Errors as clients see them: a status and an error object in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from preble.errors import (
    EngineError,
    EngineGone,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    NoReplicaError,
    Overloaded,
    PrebleError,
    RequestError,
)

HeaderList = list[tuple[bytes, bytes]]
JSON_TYPE = (b"content-type", b"application/json")
_ENGINE_CODES: Mapping[type[EngineError], str] = MappingProxyType(
    {
        EngineRefused: "engine_refused",
        EngineGone: "engine_gone",
        EngineProtocolError: "engine_protocol_error",
    }
)


class ErrorForm(msgspec.Struct, frozen=True):
    """An error answer. `retry_after_s`: rounded to whole seconds in the `Retry-After` header, None for no header."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    def body(self) -> bytes:
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": fields})

    def headers(self) -> HeaderList:
        headers = [JSON_TYPE]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, round(self.retry_after_s))))
        if self.status in (408, 413):
            headers.append((b"connection", b"close"))
        return headers


def error_form(error: PrebleError) -> ErrorForm:
    """Return the answer for an error.

    >>> error_form(NoReplicaError("no replica is up", retry_after_s=2.0)).status
    503
    """
    text = str(error)
    match error:
        case RequestError():
            return ErrorForm(error.status, "invalid_request_error", error.code, text, error.param)
        case NoReplicaError():
            return ErrorForm(503, "service_unavailable", "no_replica", text, retry_after_s=error.retry_after_s)
        case Overloaded():
            return ErrorForm(429, "rate_limit_error", "overloaded", text, retry_after_s=error.retry_after_s)
        case EngineTimeout():
            return ErrorForm(504, "engine_error", "engine_timeout", text)
        case EngineError():
            return ErrorForm(502, "engine_error", _ENGINE_CODES.get(type(error), "engine_error"), text)
        case _:
            return ErrorForm(500, "internal_error", "internal_error", "the gateway failed; its log has the details")
