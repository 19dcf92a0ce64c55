"""Endpoints whose answers come from no KV cache: embeddings, scores, speech and the like. Placed by model and load."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
from msgspec import Raw

from preble.errors import EngineProtocolError, RequestError
from preble.serving.endpoints.answers import Usage, usage_of_completion
from preble.serving.endpoints.bodies import (
    BYTES_PER_TOKEN,
    Fields,
    PromptLimits,
    Reserved,
    decoded,
    read_chat,
    read_completion,
    refuse_reserved,
)
from preble.serving.endpoints.events import EventForm


class LoadBody(Reserved, kw_only=True):
    """The fields read from a body in JSON."""

    model: str | None = None
    stream: bool | None = None
    cache_salt: Raw = Raw(b"")
    extra_key: Raw = Raw(b"")
    messages: Raw = Raw(b"")
    prompt: Raw = Raw(b"")


_BODY = msgspec.json.Decoder(LoadBody)
_BOUNDARY = re.compile(rb'multipart/form-data\b.*\bboundary=(?:"([^"]{1,70})"|([^\s;]{1,70}))', re.IGNORECASE)
_MODEL = re.compile(rb'content-disposition:[^\r\n]*\bname="?model"?[;\r]', re.IGNORECASE)


def read_by_load(body: bytes, limits: PromptLimits) -> Fields:
    """Read a JSON body for its model alone. Raises: RequestError."""
    given: LoadBody = decoded(_BODY, body)
    refuse_reserved(given)
    if given.cache_salt or given.extra_key:  # with another tenant's, its cache could be read
        raise RequestError("leave out cache_salt and extra_key: requests to this endpoint share no KV cache")
    return Fields(model=given.model or None, stream=bool(given.stream), load_tokens=len(body) // BYTES_PER_TOKEN)


def read_upload(head: bytes, content_type: bytes, length: int, *, is_whole: bool) -> Fields | None:
    """Read the beginning of a body that is no JSON; None if more of it is needed to know the model.

    `length`: of all of it, 0 if it is not known.

    >>> form = b'--x\\r\\nContent-Disposition: form-data; name="model"\\r\\n\\r\\nwhisper\\r\\n--x'
    >>> kind = b"multipart/form-data; boundary=x"
    >>> read_upload(form, kind, 0, is_whole=False).model, read_upload(form[:40], kind, 0, is_whole=False)
    ('whisper', None)
    """
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        return Fields(load_tokens=length // BYTES_PER_TOKEN)
    mark = re.escape(b"--" + (boundary[1] or boundary[2]))
    part = rb"(?:^|\r\n)" + mark + rb"\r\n((?:[^\r\n]+\r\n)+)\r\n(.*?)\r\n" + mark
    at = 0
    while (found := re.compile(part, re.DOTALL).search(head, at)) is not None:
        if _MODEL.search(found[1]):
            model = found[2].decode("utf-8", "replace")
            return Fields(model=model or None, load_tokens=length // BYTES_PER_TOKEN)
        at = found.end(2)
    return Fields(load_tokens=len(head) // BYTES_PER_TOKEN) if is_whole else None


def read_invocation(body: bytes, limits: PromptLimits) -> Fields:
    """Read a body for SageMaker's `/invocations`: a chat's, a completion's, or another one's. Raises: RequestError."""
    given: LoadBody = decoded(_BODY, body)
    read: Callable[[bytes, PromptLimits], Fields] = read_by_load
    if given.messages:
        read = read_chat
    elif given.prompt:
        read = read_completion
    return read(body, limits)


def usage_of_invocation(body: bytes) -> Usage | None:
    """Return the usage of an answer that may be a completion or anything else."""
    try:
        return usage_of_completion(body)
    except EngineProtocolError:
        return None


def no_usage(body: bytes) -> Usage | None:
    """Report nothing: no tokens of such answers count for the scheduler."""
    return None


ANY_EVENTS = EventForm(
    error=re.compile(rb'data: ?\{"error":'),
    end=re.compile(rb""),
    end_name="its end",
    usage=no_usage,
)
"""For a stream of an unknown kind."""
