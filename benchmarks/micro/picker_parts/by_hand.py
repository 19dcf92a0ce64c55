"""HTTP/2 as gRPC uses it, written by hand: what the picker had before it took the library h2 (docs/decisions/0010).

Kept to be measured beside it. It bounds neither memory nor floods.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from urllib.parse import quote

from h2.errors import ErrorCodes
from hpack import Decoder, HPACKError

from preble.picker.http2 import ProtocolError, Status

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MOST_MESSAGE_BYTES = 16 * 1024 * 1024
MOST_STREAMS = 10_000
"""The most streams at the same time on one connection."""
_MOST_HEADER_BYTES = 64 * 1024
_MOST_QUEUED_BYTES = 1024 * 1024
"""The most bytes of one stream's messages that wait to be read; beyond them its window stays shut."""
_LEAST_UPDATE_BYTES = 256 * 1024
_FRAME_BYTES = 16_384
"""The largest frame that a peer sends us: the protocol's default."""
_WINDOW = 1024 * 1024
_FIRST_WINDOW = 65_535
_CONNECTIONS_WINDOW = 2**30
_HIGHEST_WINDOW = 2**31 - 1

_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = range(10)
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_SET_STREAMS, _SET_INITIAL_WINDOW, _SET_FRAME_SIZE, _SET_HEADER_LIST = 0x3, 0x4, 0x5, 0x6
_CONTENT_TYPE = b"\x0f\x10\x10application/grpc"
"""HPACK: a literal that is not indexed, with the name of the static table's entry 31."""
_OK_HEADERS = b"\x88" + _CONTENT_TYPE


def _frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """Return a header, HPACK without an index. Both are shorter than 127 bytes, or cut."""
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value[:126]),)) + value[:126]


def _settings(**values: int) -> bytes:
    names = {"streams": _SET_STREAMS, "window": _SET_INITIAL_WINDOW, "headers": _SET_HEADER_LIST}
    pairs = (names[name].to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in values.items())
    return _frame(_SETTINGS, 0, 0, b"".join(pairs))


_GREETING = _settings(streams=MOST_STREAMS, window=_WINDOW, headers=_MOST_HEADER_BYTES) + _frame(
    _WINDOW_UPDATE, 0, 0, (_CONNECTIONS_WINDOW - _FIRST_WINDOW).to_bytes(4, "big")
)


class Stream:
    """One call. `path`: its method. `is_over`: no further message comes. `is_reset`: the peer wants nothing more.

    `changed`: called after a message, the end or a reset has come, and after output that had to wait has gone.
    """

    __slots__ = (
        *("_begun", "_connection", "_end", "_owed", "_partial", "_pending", "_queued", "_receivable"),
        *("changed", "id", "is_over", "is_reset", "messages", "path", "window"),
    )

    def __init__(self, connection: Connection, stream_id: int, path: str, window: int) -> None:
        self.id = stream_id
        self.path = path
        self.messages: deque[bytes] = deque()
        self.is_over = False
        self.is_reset = False
        self.changed: Callable[[], None] = lambda: None
        self.window = window
        self._connection = connection
        self._begun = False
        self._partial = bytearray()
        self._pending = bytearray()
        self._end = b""
        self._queued = 0
        self._owed = 0
        self._receivable = _WINDOW

    def take(self) -> bytes:
        """Return the next message; there is one."""
        message = self.messages.popleft()
        self._queued -= len(message)
        self._give_back()
        return message

    def send(self, message: bytes) -> None:
        """Send a message, as soon as the peer has room for it."""
        if not self._begun:
            self._begun = True
            self._connection.put(_frame(_HEADERS, _END_HEADERS, self.id, _OK_HEADERS))
        self._connection.send(self, b"\0" + len(message).to_bytes(4, "big") + message)

    def close(self, status: Status = Status.OK, text: str = "") -> None:
        """End the call, once everything is sent."""
        block = b"" if self._begun else _OK_HEADERS
        block += _literal(b"grpc-status", b"%d" % status)
        if text:
            block += _literal(b"grpc-message", quote(text, safe=" ,;:'()=_/").encode())
        self._end = _frame(_HEADERS, _END_HEADERS | _END_STREAM, self.id, block)
        if not self.is_over:  # the peer is to send nothing more
            self._end += _frame(_RST_STREAM, 0, self.id, ErrorCodes.NO_ERROR.to_bytes(4, "big"))
        self._connection.send(self, b"")

    @property
    def num_pending(self) -> int:
        """Bytes that wait for room at the peer."""
        return len(self._pending)

    def receive(self, payload: bytes, size: int) -> None:
        """Take in data. `size`: with its padding."""
        self._receivable -= size
        if self._receivable < 0:
            raise ProtocolError("more data than the window allows", ErrorCodes.FLOW_CONTROL_ERROR)
        self._owed += size
        if not self._partial and len(payload) >= 5 and int.from_bytes(payload[1:5], "big") == len(payload) - 5:
            self._found(payload[0], payload[5:])
        else:
            self._partial += payload
            self._cut()
        self._give_back()

    def _cut(self) -> None:
        """Find the messages that are complete."""
        partial = self._partial
        while len(partial) >= 5:
            length = int.from_bytes(partial[1:5], "big")
            if length > MOST_MESSAGE_BYTES:
                raise ProtocolError(
                    f"a message is longer than {MOST_MESSAGE_BYTES} bytes", ErrorCodes.ENHANCE_YOUR_CALM
                )
            if len(partial) < 5 + length:
                return
            self._found(partial[0], bytes(partial[5 : 5 + length]))
            del partial[: 5 + length]

    def _found(self, is_compressed: int, message: bytes) -> None:
        if is_compressed:
            raise ProtocolError("a message is compressed, but compression was not negotiated")
        self.messages.append(message)
        self._queued += len(message)

    def _give_back(self) -> None:
        if self._owed >= _LEAST_UPDATE_BYTES and self._queued < _MOST_QUEUED_BYTES and not self.is_over:
            self._connection.put(_frame(_WINDOW_UPDATE, 0, self.id, self._owed.to_bytes(4, "big")))
            self._receivable += self._owed
            self._owed = 0


class Connection:
    """One connection with a client. `opened`: called with each new stream. `wake`: called when there is output."""

    def __init__(self, opened: Callable[[Stream], None], wake: Callable[[], None]) -> None:
        self.streams: dict[int, Stream] = {}
        self._opened = opened
        self._wake = wake
        self._output: list[bytes] = [_GREETING]
        self._input = b""
        self._has_preface = False
        self._decoder = Decoder(max_header_list_size=_MOST_HEADER_BYTES)
        self._headers: tuple[int, int, bytes] | None = None
        """The stream, the flags and the block of headers that go on in the next frame."""
        self._last_id = 0
        self._window = _FIRST_WINDOW
        self._streams_window = _FIRST_WINDOW
        self._peers_frame_bytes = _FRAME_BYTES
        self._owed = 0
        self._is_leaving = False
        self._kinds = {
            _DATA: self._on_data,
            _HEADERS: self._on_headers,
            _RST_STREAM: self._on_reset,
            _SETTINGS: self._on_settings,
            _PUSH: self._on_push,
            _PING: self._on_ping,
            _WINDOW_UPDATE: self._on_window,
            _CONTINUATION: self._on_continuation,
        }

    # output

    def put(self, data: bytes) -> None:
        """Add to the output."""
        self._output.append(data)
        self._wake()

    def take_output(self) -> bytes:
        """Return the bytes to write now."""
        output, self._output = b"".join(self._output), []
        return output

    def send(self, stream: Stream, data: bytes) -> None:
        """Send data of a stream behind what waits there, and its end behind all."""
        pending = stream._pending
        pending += data
        while pending and (room := min(self._window, stream.window, self._peers_frame_bytes)) > 0:
            piece = bytes(pending[:room])
            del pending[:room]
            self._window -= len(piece)
            stream.window -= len(piece)
            self.put(_frame(_DATA, 0, stream.id, piece))
        if not pending and stream._end and self.streams.pop(stream.id, None) is not None:
            self.put(stream._end)

    def leave(self, code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Say that no further stream is served."""
        self._is_leaving = True
        self.put(_frame(_GOAWAY, 0, 0, self._last_id.to_bytes(4, "big") + code.to_bytes(4, "big")))

    # input

    held = 0
    """It counts nothing."""

    def tick(self) -> None:
        """Look after nothing."""

    def close(self, code: ErrorCodes | None = None) -> bytes:
        """End all streams; return the last bytes to write."""
        for stream_id in [*self.streams]:
            self._on_reset(0, stream_id, b"")
        return self.take_output()

    def receive(self, data: bytes) -> int:
        """Take in what the peer has sent. Raises: ProtocolError: take the last output, and nothing more in."""
        data = self._input + data if self._input else data
        position = 0
        try:
            if not self._has_preface:
                position = self._greeted(data)
            while self._has_preface and len(data) - position >= 9:
                length = int.from_bytes(data[position : position + 3], "big")
                if length > _FRAME_BYTES:
                    raise ProtocolError("a frame is too large", ErrorCodes.FRAME_SIZE_ERROR)
                start = position + 9
                if len(data) < start + length:
                    break
                stream_id = int.from_bytes(data[position + 5 : start], "big") & _HIGHEST_WINDOW
                self._on_frame(data[position + 3], data[position + 4], stream_id, data[start : start + length])
                position = start + length
        except ProtocolError as error:
            self.leave(error.code)
            raise
        self._input = data[position:]
        return 0

    def _greeted(self, data: bytes) -> int:
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise ProtocolError("this is not HTTP/2 with prior knowledge")
        self._has_preface = len(data) >= len(PREFACE)
        return len(PREFACE) if self._has_preface else 0

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._headers is not None and kind != _CONTINUATION:
            raise ProtocolError("headers are not continued")
        if (handle := self._kinds.get(kind)) is not None:
            handle(flags, stream_id, payload)

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._owed += size
        if self._owed >= _CONNECTIONS_WINDOW // 2:
            self.put(_frame(_WINDOW_UPDATE, 0, 0, self._owed.to_bytes(4, "big")))
            self._owed = 0
        stream = self.streams.get(stream_id)
        if stream is None:
            self._require_known(stream_id)
            return
        if stream.is_over:
            raise ProtocolError("data after the end of a stream")
        stream.receive(_unpadded(flags, payload), size)
        stream.is_over = bool(flags & _END_STREAM)
        stream.changed()

    def _require_known(self, stream_id: int) -> None:
        if stream_id == 0 or stream_id > self._last_id:
            raise ProtocolError("a frame of a stream that was never opened")

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        payload = _unpadded(flags, payload)
        if flags & _WITH_PRIORITY:
            payload = payload[5:]
        self._headers = (stream_id, flags, payload)
        if flags & _END_HEADERS:
            self._headers_complete()

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._headers is None or self._headers[0] != stream_id:
            raise ProtocolError("a continuation of nothing")
        _, of_headers, block = self._headers
        if not payload or len(block) + len(payload) > _MOST_HEADER_BYTES:
            raise ProtocolError("headers are too large", ErrorCodes.ENHANCE_YOUR_CALM)
        self._headers = (stream_id, of_headers, block + payload)
        if flags & _END_HEADERS:
            self._headers_complete()

    def _headers_complete(self) -> None:
        assert self._headers is not None
        (stream_id, flags, block), self._headers = self._headers, None
        try:
            headers = self._decoder.decode(block, raw=True)
        except HPACKError as error:
            raise ProtocolError("headers cannot be decoded", ErrorCodes.COMPRESSION_ERROR) from error
        if stream_id <= self._last_id:
            if (stream := self.streams.get(stream_id)) is not None:
                stream.is_over = True
                stream.changed()
            return
        if not stream_id & 1:
            raise ProtocolError("a client's streams are odd")
        self._last_id = stream_id
        if self._is_leaving or len(self.streams) >= MOST_STREAMS:
            self.put(_frame(_RST_STREAM, 0, stream_id, ErrorCodes.REFUSED_STREAM.to_bytes(4, "big")))
            return
        path = next((bytes(value) for name, value in headers if name == b":path"), b"")
        stream = Stream(self, stream_id, path.decode("latin-1"), self._streams_window)
        stream.is_over = bool(flags & _END_STREAM)
        self.streams[stream_id] = stream
        self._opened(stream)

    def _on_reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._require_known(stream_id)
        if (stream := self.streams.pop(stream_id, None)) is not None:
            stream.is_reset = stream.is_over = True
            stream.changed()

    def _on_push(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ProtocolError("clients push nothing")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise ProtocolError("a ping has 8 bytes", ErrorCodes.FRAME_SIZE_ERROR)
        if not flags & _ACK:
            self.put(_frame(_PING, _ACK, 0, payload))

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & _ACK:
            return
        if len(payload) % 6:
            raise ProtocolError("a setting has 6 bytes", ErrorCodes.FRAME_SIZE_ERROR)
        for start in range(0, len(payload), 6):
            name = int.from_bytes(payload[start : start + 2], "big")
            self._set(name, int.from_bytes(payload[start + 2 : start + 6], "big"))
        self.put(_frame(_SETTINGS, _ACK, 0))
        self._send_waiting()

    def _set(self, name: int, value: int) -> None:
        if name == _SET_INITIAL_WINDOW:
            if value > _HIGHEST_WINDOW:
                raise ProtocolError("the window is too large", ErrorCodes.FLOW_CONTROL_ERROR)
            for stream in self.streams.values():
                stream.window += value - self._streams_window
            self._streams_window = value
        elif name == _SET_FRAME_SIZE:
            if not _FRAME_BYTES <= value < 2**24:
                raise ProtocolError("no such frame size")
            self._peers_frame_bytes = value

    def _on_window(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4 or not (more := int.from_bytes(payload, "big") & _HIGHEST_WINDOW):
            raise ProtocolError("a window grows by 1 or more")
        if stream_id == 0:
            self._window += more
            self._require_window(self._window)
            self._send_waiting()
        elif (stream := self.streams.get(stream_id)) is not None:
            stream.window += more
            self._require_window(stream.window)
            self._resume(stream)
        else:
            self._require_known(stream_id)

    @staticmethod
    def _require_window(size: int) -> None:
        if size > _HIGHEST_WINDOW:
            raise ProtocolError("the window is too large", ErrorCodes.FLOW_CONTROL_ERROR)

    def _send_waiting(self) -> None:
        for stream in list(self.streams.values()):
            self._resume(stream)

    def _resume(self, stream: Stream) -> None:
        if stream.num_pending:
            self.send(stream, b"")
            stream.changed()


def _unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & _PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("more padding than frame")
    return payload[1 : len(payload) - payload[0]]
