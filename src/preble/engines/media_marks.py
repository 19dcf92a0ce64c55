"""What identifies the parts of a prompt that are no text: images, videos, sounds.

An engine computes such a part as a run of one placeholder token, so by their token ids all images of a size are the
same. Here the first token of the run becomes a *mark*: a token id made from the part's identifier, above every
vocabulary. Prompts with marks then match as the engine's own block hashes do: the text before an image, and what
follows it only after the same image.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from blake3 import blake3

STAND_IN = "\uf8fe"
"""In a text in the place of a medium. For private use: nobody writes it, and no tokenizer merges it with others."""

_TEXTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
FIRST_MARK = 2**31
"""No engine has a token of such an id."""

_LONGEST_LEAD_IN = 4
"""Tokens of a part before its run, such as "image begins": the most that a model we know of has."""
_PNG_START, _PNG_COLOR_TYPE_AT, _PNG_RGB = b"\x89PNG\r\n\x1a\n", 25, 2

_SEQUENCE, _MAPPING, _LEAF = b"\x01", b"\x02", b"\x03"


Part = dict[str, Any]


def mark_of(identifier: str) -> int:
    """Return the token id that stands for a part of a prompt.

    >>> mark_of("a") == mark_of("a"), mark_of("a") == mark_of("b"), 2**31 <= mark_of("a") < 2**32
    (True, False, True)
    """
    digest = blake2b(identifier.encode(errors="surrogatepass"), digest_size=4).digest()
    return FIRST_MARK | int.from_bytes(digest)


def run_start(token_ids: Sequence[int], offset: int) -> int:
    """Return where the run of placeholders begins in a part that begins at `offset`.

    >>> run_start([5, 9, 7, 7, 7], 1), run_start([5, 7, 7], 1), run_start([5, 7], 1)
    (2, 1, 1)
    """
    last = min(offset + _LONGEST_LEAD_IN, len(token_ids) - 2)
    starts = (i for i in range(offset, last + 1) if token_ids[i] == token_ids[i + 1])
    return next(starts, offset)


def with_stand_ins(messages: Any, path: str, settings: bytes = b"", stand_in: str = STAND_IN) -> tuple[Any, list[str]]:
    """Return a chat's messages with a stand-in for each medium, and the media's identifiers. As `identifier_of`.

    >>> with_stand_ins([{"role": "user", "content": [{"type": "image_url", "uuid": "cat"}]}], "")[1]
    ['cat']
    """
    if not isinstance(messages, list):
        return messages, []
    identifiers: list[str] = []
    shown = []
    for message in messages:
        if isinstance(message, dict) and isinstance(parts := message.get("content"), list):
            identifiers += [identifier_of(part, path, settings) for part in parts if _is_medium(part)]
            text = {"type": "text", "text": stand_in}
            message = {**message, "content": [text if _is_medium(part) else part for part in parts]}
        shown.append(message)
    return shown, identifiers


def _is_medium(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") not in _TEXTS


def identifier_of(part: Part, path: str, settings: bytes = b"") -> str:
    """Return what identifies a medium: vLLM's own word for it where that is known, else one made of what is sent.

    `path`: what the engine was started with. `settings`: the request's, for reading media.

    >>> identifier_of({"type": "image_url", "uuid": "cat", "image_url": None}, "")
    'cat'
    """
    if not settings and isinstance(uuid := part.get("uuid"), str):
        return uuid
    if not settings and (image := _image_of(part)) is not None:
        return vllm_image_identifier(path, image)
    return blake2b(settings + msgspec.json.encode(part, order="sorted"), digest_size=16).hexdigest()


def _image_of(part: Part) -> bytes | None:
    """Return the file of an image that comes within the request."""
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    if part.get("type") != "image_url" or not isinstance(url, str) or not url.startswith("data:"):
        return None
    header, _, data = url.partition(",")
    try:
        return b64decode(data, validate=True) if header.endswith(";base64") else None
    except (binascii.Error, ValueError):
        return None


def vllm_image_identifier(model: str, image: bytes) -> str:
    """Return what vLLM calls an image in its block hashes. `model`: as it was started with. `image`: the whole file.

    It holds for vLLM's default settings; with others it is an identifier that vLLM does not use.
    """
    data = _leaf(image)
    if image.startswith(_PNG_START) and image[_PNG_COLOR_TYPE_AT : _PNG_COLOR_TYPE_AT + 1] != bytes([_PNG_RGB]):
        white = _SEQUENCE + _length(3) + 3 * _leaf(_length(255))
        to_rgb = _mapping({"image_mode": _leaf(b"RGB"), "rgba_background_color": white})
        data = _mapping({"io_config": to_rgb, "data": data})
    hashed = {"image": _LEAF + _framed(b"image") + data, "model_id": _leaf(model.encode())}
    return blake3(b"".join(_framed(key.encode()) + value for key, value in hashed.items())).hexdigest()


def _length(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _framed(chunk: bytes) -> bytes:
    return _length(len(chunk)) + chunk


def _leaf(chunk: bytes) -> bytes:
    return _LEAF + _framed(chunk)


def _mapping(items: dict[str, bytes]) -> bytes:
    return _MAPPING + _length(len(items)) + b"".join(_framed(key.encode()) + value for key, value in items.items())
