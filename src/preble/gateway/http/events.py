"""Server-sent events as bytes: written, recognized, and taken apart."""

from __future__ import annotations

from preble.errors import EngineProtocolError

EVENT_STREAM = b"text/event-stream"
DONE = b"data: [DONE]\n\n"
_STARTS = (b"data:", b"event:", b"id:", b"retry:", b":")


def looks_like_events(first: bytes) -> bool:
    """Return whether a stream that begins with these bytes may be server-sent events.

    >>> looks_like_events(b'data: {"id": 1}'), looks_like_events(b"da"), looks_like_events(b"<html>")
    (True, True, False)
    """
    text = first.lstrip()
    return bool(first) and any(start.startswith(text[: len(start)]) for start in _STARTS)


def event(data: bytes) -> bytes:
    """Return one event with `data`, which has no line break."""
    return b"data: " + data + b"\n\n"


class EventSplitter:
    """Cuts a stream of bytes into the data of its events. `max_event_bytes`: the most that one event may have."""

    __slots__ = ("_max_event_bytes", "_rest")

    def __init__(self, max_event_bytes: int = 16 * 1024 * 1024) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        r"""Return the data of the events that this chunk completes. O(chunk + those events).

        Raises: EngineProtocolError: an event does not end.

        >>> splitter = EventSplitter()
        >>> splitter.feed(b'data: 1\n\nda'), splitter.feed(b'ta: 2\r\n\r\n: comment\n\n')
        ([b'1'], [b'2'])
        """
        # The bytes kept from before contain no end of an event, but perhaps the beginning of one.
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
