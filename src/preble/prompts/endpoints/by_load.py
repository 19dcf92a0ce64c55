"""Endpoints whose answers come from no KV cache: embeddings, scores, speech and the like. Placed by model and load."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
from msgspec import Raw

from preble.errors import EngineProtocolError, RequestError
from preble.prompts.endpoints.answers import Usage, usage_of_completion
from preble.prompts.endpoints.bodies import (
    BYTES_PER_TOKEN,
    Fields,
    PromptLimits,
    check_ids,
    decoded,
    read_chat,
    read_completion,
)
from preble.prompts.endpoints.events import EventForm
from preble.prompts.endpoints.shared_fields import Reserved, refuse_reserved


class LoadBody(Reserved, kw_only=True):
    """The fields read from a body in JSON."""

    model: str | None = None
    stream: bool | None = None
    cache_salt: Raw = Raw(b"")
    extra_key: Raw = Raw(b"")
    messages: Raw = Raw(b"")
    prompt: Raw = Raw(b"")
    input: Raw = Raw(b"")
    input_ids: Raw = Raw(b"")
    items: Raw = Raw(b"")
    label_token_ids: Raw = Raw(b"")
    query: Raw = Raw(b"")


_BODY = msgspec.json.Decoder(LoadBody)
_MAY_BE_IDS = ("input", "input_ids", "items", "label_token_ids", "query")
_BOUNDARY = re.compile(rb'multipart/form-data\b.*\bboundary=(?:"([^"]{1,70})"|([^\s;]{1,70}))', re.IGNORECASE)
_MODEL = re.compile(rb'^content-disposition:[^\r\n]*\bname="?model"?\s*(?:;|\r?$)', re.IGNORECASE | re.MULTILINE)
_PART_HEAD_BYTES = 8 * 1024
MOST_BEFORE_MODEL = 32 * 1024 * 1024
"""Of a form that names its model after the file, this much is kept until then: OpenAI takes 25 MB of sound."""


def read_by_load(body: bytes, limits: PromptLimits) -> Fields:
    """Read a JSON body for its model alone. Raises: RequestError."""
    given: LoadBody = decoded(_BODY, body)
    refuse_reserved(given)
    if given.cache_salt or given.extra_key:  # with another tenant's, its cache could be read
        raise RequestError("leave out cache_salt and extra_key: requests to this endpoint share no KV cache")
    for name in _MAY_BE_IDS:
        check_ids(getattr(given, name), limits, name)
    return Fields(model=given.model or None, stream=bool(given.stream), load_tokens=len(body) // BYTES_PER_TOKEN)


class UploadHead:
    """The beginning of a body that is no JSON, up to the part that names the model. Reads each byte once.

    `bytes`: what has come so far.

    >>> head = UploadHead(b"multipart/form-data; boundary=x", 0)
    >>> head.add(b'--x\\r\\nContent-Disposition: form-data; name="model"\\r\\n\\r\\nwhis')
    >>> head.add(b"per\\r\\n--x").model
    'whisper'
    """

    def __init__(self, content_type: bytes, length: int) -> None:
        """`length`: of the whole body, 0 if it is not known."""
        boundary = _BOUNDARY.search(content_type)
        self._mark = None if boundary is None else b"\r\n--" + (boundary[1] or boundary[2])
        self._load_tokens = length // BYTES_PER_TOKEN
        self._part_at = 0
        self._searched_to = 0
        self.bytes = bytearray()

    def add(self, piece: bytes) -> Fields | None:
        """Read the next piece; return None if more are needed to know the model. Raises: RequestError: too many are."""
        self.bytes += piece
        if self._mark is None:
            return Fields(load_tokens=self._load_tokens)
        if (model := self._model(self._mark)) is not None:
            return Fields(model=model.decode("utf-8", "replace") or None, load_tokens=self._load_tokens)
        if len(self.bytes) > MOST_BEFORE_MODEL:
            text = f"the first {MOST_BEFORE_MODEL >> 20} MiB name no model; send the field `model` before the file"
            raise RequestError(text, param="model")
        return None

    def whole(self) -> Fields:
        """Return the fields of a body that is complete and names no model."""
        return Fields(load_tokens=len(self.bytes) // BYTES_PER_TOKEN)

    def _model(self, mark: bytes) -> bytes | None:
        while (end := self.bytes.find(mark, self._searched_to)) >= 0:
            head = self.bytes[self._part_at : min(end, self._part_at + _PART_HEAD_BYTES)].partition(b"\r\n\r\n")[0]
            if _MODEL.search(head):
                return bytes(self.bytes[self._part_at + len(head) + 4 : end])
            self._part_at = self._searched_to = end + len(mark)
        # The next piece may complete a mark that has begun.
        self._searched_to = max(self._searched_to, len(self.bytes) - len(mark) + 1)
        return None


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
