"""Server-sent events: measured as they pass through, or taken apart where answers have to be merged."""

from __future__ import annotations

import msgspec

from preble.errors import EngineProtocolError
from preble.serving.api import Usage

DONE = b"data: [DONE]\n\n"
_STARTS = (b"data:", b"event:", b"id:", b"retry:", b":")


class _Piece(msgspec.Struct):
    usage: Usage | None = None


_PIECE = msgspec.json.Decoder(_Piece)


def looks_like_events(first: bytes) -> bool:
    """Whether a stream's first bytes may be server-sent events.

    >>> looks_like_events(b'data: {"id": 1}'), looks_like_events(b"da"), looks_like_events(b"<html>")
    (True, True, False)
    """
    text = first.lstrip()
    return bool(first) and any(start.startswith(text[: len(start)]) for start in _STARTS)


def event(data: bytes) -> bytes:
    """One event with `data`, which has no line break."""
    return b"data: " + data + b"\n\n"


class StreamMeter:
    """Counts the events of a stream in the bytes, without taking them apart. O(bytes), copies nothing.

    Engines send about one event a token, so the count stands in for output tokens where no usage is reported. Events
    are counted by the blank lines that end them; comments count too, which an estimate may.
    """

    __slots__ = ("_in_line_end", "_last", "_last_but_one", "events")

    def __init__(self) -> None:
        self.events = 0
        self._in_line_end = False
        self._last = b""
        self._last_but_one = b""

    def feed(self, chunk: bytes) -> None:
        """Take note of the next bytes of the stream."""
        if not chunk:
            return
        self.events += chunk.count(b"\n\n") + chunk.count(b"\n\r\n") + (self._in_line_end and chunk.startswith(b"\n"))
        self._in_line_end = chunk.endswith(b"\n") and not chunk.endswith(b"\n\n")
        self._last_but_one, self._last = self._last, chunk

    def usage(self) -> Usage | None:
        """The usage that the stream ended with, None where it reported none.

        It is looked for in the last two chunks: engines send the usage in its own event just before `[DONE]`.
        """
        tail = self._last_but_one + self._last
        if b'"usage"' not in tail:
            return None
        for line in reversed(tail.splitlines()):
            if line.startswith(b"data:") and b'"usage"' in line and (usage := _usage(line[5:])):
                return usage
        return None

    def output_tokens(self) -> int:
        """Tokens as reported, else as many as there were events before `[DONE]`."""
        usage = self.usage()
        if usage is not None and usage.output_tokens is not None:
            return usage.output_tokens
        return self.events - (b"data: [DONE]" in self._last_but_one[-32:] + self._last[-32:])


def _usage(data: bytes) -> Usage | None:
    try:
        return _PIECE.decode(data).usage
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


class EventSplitter:
    """Cuts a stream of bytes into the data of its events. `max_event_bytes`: of one event."""

    __slots__ = ("_max_event_bytes", "_rest")

    def __init__(self, max_event_bytes: int = 16 * 1024 * 1024) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        r"""The data of the events that are complete now. O(chunk + events that it completes).

        Raises: EngineProtocolError: an event does not end.

        >>> splitter = EventSplitter()
        >>> splitter.feed(b'data: 1\n\nda'), splitter.feed(b'ta: 2\r\n\r\n: comment\n\n')
        ([b'1'], [b'2'])
        """
        # What was there before has no end of an event in it, but perhaps the beginning of one.
        unsearched = max(len(self._rest) - 2, 0)
        self._rest += chunk
        whole: list[bytes] = []
        if self._rest.find(b"\n\n", unsearched) >= 0 or self._rest.find(b"\n\r\n", unsearched) >= 0:
            *whole, rest = bytes(self._rest).replace(b"\r\n", b"\n").split(b"\n\n")
            self._rest = bytearray(rest)
        if len(self._rest) > self._max_event_bytes:
            raise EngineProtocolError(f"an event in the replica's stream is larger than {self._max_event_bytes} bytes")
        return [data for data in map(_data_of, whole) if data]


def _data_of(block: bytes) -> bytes:
    return b"\n".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
