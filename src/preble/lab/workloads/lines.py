"""Lines of trace files, plain or compressed, and errors that name them."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from preble.errors import TraceFormatError

_GZIP_MAGIC = b"\x1f\x8b"

Line = TypeVar("Line")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the non-empty lines, numbered from 1; the first bytes of a file, not its name, say if it is compressed.

    Raises: TraceFormatError: the file cannot be read.
    """
    try:
        with path.open("rb") as raw:
            lines = gzip.GzipFile(fileobj=raw) if raw.peek(2).startswith(_GZIP_MAGIC) else raw
            for number, line in enumerate(lines, start=1):
                content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if content.strip():
                    yield number, content
    except (OSError, EOFError, zlib.error) as error:
        raise TraceFormatError(f"{path}: cannot be read: {error}") from error


def decoded_lines(path: Path, line_type: type[Line], example: str) -> Iterator[tuple[int, Line]]:
    """Yield each line, decoded as JSON of this type, with its number. `example`: a good line for error messages.

    Raises: TraceFormatError: the file cannot be read, or a line is not JSON or not of this type.
    """
    decoder = msgspec.json.Decoder(line_type)
    for number, line in numbered_lines(path):
        try:
            decoded = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise bad_line(path, number, f"{error}; a line looks like {example}") from error
        yield number, decoded


def bad_line(path: Path, number: int, message: str) -> TraceFormatError:
    """Return the error about one line of a file."""
    return TraceFormatError(f"{path}:{number}: {message}")
