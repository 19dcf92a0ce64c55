"""Errors as clients see them: a status and an error object, in the form of the endpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from enum import Enum
from types import MappingProxyType
from typing import Any

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

_ANTHROPIC_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
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


class ErrorStyle(Enum):
    """Whose form an endpoint's errors have."""

    OPENAI = "OpenAI"
    ANTHROPIC = "Anthropic"
    RESPONSES = "OpenAI Responses"


class ErrorForm(msgspec.Struct, frozen=True):
    """An error answer. `retry_after_s`: rounded to whole seconds in the `Retry-After` header, None for no header."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    def body(self, style: ErrorStyle = ErrorStyle.OPENAI) -> bytes:
        """Return the body of an answer."""
        if style is ErrorStyle.ANTHROPIC:
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": self.message}})
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": fields})

    def event(self, style: ErrorStyle = ErrorStyle.OPENAI) -> bytes:
        """Return the event that ends a stream which has begun."""
        match style:
            case ErrorStyle.OPENAI:
                return b"data: " + self.body() + b"\n\n"
            case ErrorStyle.ANTHROPIC:
                return b"event: error\ndata: " + self.body(style) + b"\n\n"
            case ErrorStyle.RESPONSES:
                fields = {"type": "error", "code": self.code, "message": self.message, "param": self.param}
                return b"event: error\ndata: " + msgspec.json.encode(fields) + b"\n\n"

    def headers(self) -> HeaderList:
        headers = [JSON_TYPE]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, round(self.retry_after_s))))
        if self.status in (408, 413):
            headers.append((b"connection", b"close"))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def in_style(style: ErrorStyle, status: int, body: bytes) -> bytes:
    """Return a replica's error, a JSON object, in this style: vLLM gives some at Anthropic's paths in OpenAI's form.

    >>> in_style(ErrorStyle.ANTHROPIC, 400, b'{"error": {"message": "no"}}')
    b'{"type":"error","error":{"type":"invalid_request_error","message":"no"}}'
    """
    if style is not ErrorStyle.ANTHROPIC:
        return body
    try:
        given: dict[str, Any] = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):  # what it says cannot be shown in another form
        given = {}
    if given.get("type") == "error":
        return body
    inner = given.get("error")
    message = (inner if isinstance(inner, dict) else given).get("message") or "the replica refuses the request"
    return ErrorForm(status, "", "", str(message)).body(style)


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


def read_retry_after(header: str) -> float:
    """Return the seconds that a replica's `Retry-After` header asks for, 0 if it asks for none.

    >>> [read_retry_after(header) for header in ("30", "", "soon", "Fri, 01 Jan 1999 00:00:00 GMT")]
    [30.0, 0.0, 0.0, 0.0]
    """
    if not header:
        return 0.0
    if header.isascii() and header.isdigit():
        return float(header[:9])
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
