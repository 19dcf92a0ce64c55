"""Fields added to a JSON body, whose other bytes stay as they are. Of two of a name, parsers take the later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


def add_fields_before(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return the JSON object `body`, which is not empty, with these fields; its own of the same name count instead.

    >>> add_fields_before(b'{"prompt": "x"}', {"bootstrap_room": 7})
    b'{"bootstrap_room":7,"prompt": "x"}'
    """
    return msgspec.json.encode(dict(fields))[:-1] + b"," + body.lstrip()[1:].lstrip()


def add_fields_after(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return the JSON object `body`, which is not empty, with these fields in place of its own of the same name.

    >>> add_fields_after(b'{"prompt": "a"} ', {"cache_salt": "s"})
    b'{"prompt": "a","cache_salt":"s"}'
    """
    return body.rstrip()[:-1] + b"," + msgspec.json.encode(dict(fields))[1:]
