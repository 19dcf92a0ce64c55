"""The strict reader of decision logs: it refuses what the format does not define, with file and line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import msgspec

from preble.decisions.lines import VERSION, DroppedLine, Event, FullLine, Header, Line
from preble.errors import ConfigError, TraceFormatError

REFERENCE = "the format is described in docs/reference/decision-log.md"


class Numbered(NamedTuple):
    """An event of the log and its line number, from 1."""

    number: int
    event: Event


class LogReader:
    """Yield the events of one log, up to the first missing line. Iterate over it once.

    `header` is read at once. `ended_at`, after iterating: why the events end before the log does; None if they do not.
    A last line without a line break is ignored: the log is still being written, or its writer was killed.

    Raises, on construction and while iterating: TraceFormatError: it cannot be read or is not a log.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ended_at: str | None = None
        self._decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
        self._lines = self._read()
        number, first = next(self._lines, (1, None))
        if first is None:
            raise TraceFormatError(f"{path}: the log is empty; {REFERENCE}")
        if not isinstance(first, Header):
            raise self.error(number, 'the first line must be of kind "log"')
        if first.version != VERSION:
            raise self.error(number, f"unknown version {first.version}; this Preble reads version {VERSION}")
        self.header = first

    def __iter__(self) -> Iterator[Numbered]:
        latest_s = self.header.t
        for number, line in self._lines:
            match line:
                case Header():
                    raise self.error(number, "a second log begins here; keep one log per file")
                case DroppedLine(count=count):
                    self.ended_at = f"line {number}: {count} lines are missing from the log here"
                    return
                case FullLine():
                    self.ended_at = f"line {number}: the log had reached its size limit"
                    return
            if line.t < latest_s:
                raise self.error(number, f"time goes back, from {latest_s} to {line.t}")
            latest_s = line.t
            yield Numbered(number, line)

    def error(self, number: int, what: object) -> TraceFormatError:
        """Return an error that names this log and the line."""
        return TraceFormatError(f"{self.path}:{number}: {what}; {REFERENCE}")

    def _read(self) -> Iterator[tuple[int, Line]]:
        try:
            with _open(self.path) as raw_lines:
                for number, raw in enumerate(raw_lines, start=1):
                    if raw.endswith(b"\n"):
                        yield number, self._decoded(number, raw)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceFormatError(f"{self.path}: cannot be read: {error}") from error

    def _decoded(self, number: int, raw: bytes) -> Line:
        try:
            return self._decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, ConfigError, ValueError) as error:
            raise self.error(number, error) from error


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    if path.suffix == ".gz":
        with gzip.open(path, "rb") as compressed:
            yield cast(BinaryIO, compressed)
    else:
        with path.open("rb") as plain:
            yield plain
