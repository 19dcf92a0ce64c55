"""Chats with images in them."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

QUESTION = "What does this picture show? Say it in a few words, and name the colours that you see. " * 4
AFTER = "And now the same as a poem in four lines, if you please. " * 4


def png(seed: int, size: int = 8) -> bytes:
    """A picture that no other seed has."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes((37 * seed + 3 * x + 7 * y) % 256 for x in range(3 * size)) for y in range(size))
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def image_part(seed: int) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(png(seed)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def chat_about(*seeds: int, question: str = QUESTION, after: str = AFTER, **fields: Any) -> dict[str, Any]:
    """A question, these pictures, and a wish that follows them."""
    parts = [{"type": "text", "text": question}, *map(image_part, seeds), {"type": "text", "text": after}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, **fields}
