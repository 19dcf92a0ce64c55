"""gRPC's messages over HTTP/2, from the server's side. Pure: bytes in, bytes out.

The library `h2` keeps the protocol: frames, headers, states, windows (docs/decisions/0010). Here is what one peer may
take:

- Memory. What has come and is not read counts as held (`Connection.held`), and so does what waits for the peer's room.
  A stream has a window of `_WINDOW` bytes. A longer message gets the rest as a grant, and the grants of a connection
  together are at most one of the longest messages; the next one waits until a message is complete. So no message waits
  for room that unfinished ones hold.
- Work. Frames that carry nothing, and streams that are reset as soon as they are opened, are counted between two calls
  of `tick`. A peer that sends too many is told to calm down, and left.
- Time. `tick` also ends connections that do not greet or are not used, and calls without a first message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RemoteSettingsChanged,
    RequestReceived,
    SettingsAcknowledged,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import NoSuchStreamError
from h2.exceptions import ProtocolError as BrokenProtocol
from h2.settings import SettingCodes, Settings

MOST_MESSAGE_BYTES = 4 * 1024 * 1024
"""What gRPC's own libraries take by default. Envoy sends what its buffers hold: a body in messages of up to 1 MiB."""
MOST_STREAMS = 1024
"""The most streams at the same time on one connection, as Envoy has it; its gateways open further connections."""
MOST_EARLY_RESETS = 200
"""The most streams between two ticks that are opened, and reset before they are answered."""
MOST_IDLE_FRAMES = 2_000
"""The most frames between two ticks that carry nothing: pings, settings, priorities, empty data, updates of windows."""
GREETING_TICKS = 10
"""Within so many ticks a peer greets and confirms our settings."""
FIRST_MESSAGE_TICKS = 10
"""Within so many ticks a call has its first message."""
UNUSED_TICKS = 600
"""A connection without a stream for so many ticks is closed."""
STREAM_BYTES = 8 * 1024
"""What an open stream counts as held, for its objects here and those of its request."""

_SETTINGS_WEIGHT = 50
"""New settings are as much work as so many other frames: they change every stream."""
_USEFUL_WEIGHT = 10
"""A message, or a frame of data that is sent, makes up for so many frames that carry nothing."""
_MOST_SILENT_BYTES = 80 * 1024
"""The most bytes in frames of which nothing comes: of headers that go on and on."""
_MOST_OUTPUT_BYTES = 64 * 1024
"""About the most that is put out at once. The rest waits here, where it counts as held."""
_WINDOW = 16 * 1024
_LEAST_UPDATE_BYTES = 8 * 1024
_CONNECTIONS_WINDOW = 8 * 1024 * 1024
_FIRST_WINDOW = 65_535
_GOAWAY = b"\x00\x00\x08\x07\x00\x00\x00\x00\x00"
"""A frame's head: 8 bytes, of kind 7, of no stream."""
_RESET = b"\x00\x00\x04\x03\x00"
"""How a frame begins that ends a stream: 4 bytes, of kind 3."""
_OK_HEADERS = ((b":status", b"200"), (b"content-type", b"application/grpc"))
# What is sent are our own headers, and all that is read of a peer's is the path.
_CONFIG = H2Configuration(
    client_side=False,
    normalize_inbound_headers=False,
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
)


class Status(IntEnum):
    """How a call ends, as gRPC numbers it."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class ProtocolError(Exception):
    """The connection ends: write the last output, then close. `code`: why, as HTTP/2 numbers it."""

    def __init__(self, text: str, code: ErrorCodes = ErrorCodes.PROTOCOL_ERROR) -> None:
        super().__init__(text)
        self.code = code


class _Protocol(H2Connection):
    DEFAULT_MAX_HEADER_LIST_SIZE = 16 * 1024
    MAX_CLOSED_STREAMS = MOST_STREAMS
    """How many streams are remembered after their end. By default it is 65,536, which takes 8 MB a connection."""


def _nothing() -> None:
    pass


class Http2Stream:
    """One call. `path`: its method. `is_over`: no further message comes. `is_reset`: nothing more is to be sent.

    `changed`: called after a message, the end or a reset has come, and after output that had to wait has gone.
    """

    __slots__ = (
        *(
            "_connection",
            "_granted",
            "_has_head",
            "_is_begun",
            "_missing",
            "_opened_at",
            "_owed",
            "_partial",
            "_pending",
        ),
        *("_trailers", "_unread", "changed", "id", "is_over", "is_reset", "messages", "path"),
    )

    def __init__(self, connection: Connection, stream_id: int, path: str, opened_at: int) -> None:
        self.id = stream_id
        self.path = path
        self.messages: deque[bytes] = deque()
        self.is_over = False
        self.is_reset = False
        self.changed: Callable[[], None] = _nothing
        self._connection = connection
        self._opened_at = opened_at
        self._is_begun = False
        self._has_head = False
        self._partial = bytearray()
        self._pending = bytearray()
        self._trailers: list[tuple[bytes, bytes]] | None = None
        self._unread = 0
        self._owed = 0
        """Bytes by which the peer's window is to grow; less than zero while a grant is being used up."""
        self._missing = 0
        """Bytes that the message lacks that is coming."""
        self._granted = 0

    def take(self) -> bytes:
        """Return the next message; there is one."""
        message = self.messages.popleft()
        self._connection.read(self, len(message) + 5)
        return message

    def send(self, message: bytes) -> None:
        """Send a message, as soon as the peer has room for it."""
        self._connection.send(self, b"\0" + len(message).to_bytes(4, "big") + message)

    def close(self, status: Status = Status.OK, text: str = "") -> None:
        """End the call, once everything is sent."""
        self._trailers = [(b"grpc-status", b"%d" % status)]
        if text:
            self._trailers.append((b"grpc-message", quote(text[:500], safe=" ,;:'()=_/").encode()))
        self._connection.send(self, b"")

    def fail(self, status: Status, text: str) -> None:
        """End the call now, whatever its method does."""
        self._connection.drop_pending(self)
        self.close(status, text)
        self.is_reset = True
        self.changed()

    @property
    def num_pending(self) -> int:
        """Bytes that wait for room at the peer."""
        return len(self._pending)

    def receive(self, payload: bytes) -> int:
        """Take in data. Return how many messages are complete with it."""
        partial, found = self._partial, 0
        partial += payload
        self._unread += len(payload)
        while len(partial) >= 5:
            length = int.from_bytes(partial[1:5], "big")
            if partial[0] or length > MOST_MESSAGE_BYTES:
                self._refuse(bool(partial[0]))
                break
            self._missing = max(0, 5 + length - len(partial))
            if self._missing:
                break
            self.messages.append(bytes(partial[5 : 5 + length]))
            del partial[: 5 + length]
            found += 1
        return found

    def _refuse(self, is_compressed: bool) -> None:
        self._partial.clear()
        if is_compressed:
            self.fail(Status.INTERNAL, "a message is compressed, but compression was not negotiated")
        else:
            self.fail(Status.RESOURCE_EXHAUSTED, f"a message is longer than {MOST_MESSAGE_BYTES} bytes")


class Connection:
    """One connection with a client.

    `begun`: called with each new stream, once its first message or its end has come: a stream that is opened and reset
    costs little. `wake`: called when there is output.
    """

    def __init__(self, begun: Callable[[Http2Stream], None], wake: Callable[[], None]) -> None:
        self.streams: dict[int, Http2Stream] = {}
        self._begun = begun
        self._wake = wake
        self._is_greeted = False
        self._is_leaving = False
        self._is_closed = False
        self._has_said_why = False
        self._output: list[bytes] = []
        self._unread = 0
        self._pending = 0
        self._silent = 0
        self._owed = 0
        self._granted = 0
        self._asking: dict[Http2Stream, None] = {}
        """Streams whose long message waits for a grant, in their order."""
        self._changed: dict[Http2Stream, None] = {}
        """Streams with something to put out."""
        self._blocked: dict[Http2Stream, None] = {}
        """Streams whose peer has no room."""
        self._room = 0
        self._ticks = self._used_at = 0
        self._early_resets = self._idle_frames = 0
        self._h2 = h2 = _Protocol(_CONFIG)
        # A peer may open streams and fill windows of the protocol's default size before it has read our settings: they
        # count from when it has confirmed them. `initiate_connection` would have them count from the start.
        h2.local_settings = Settings(client=False, initial_values={SettingCodes.MAX_CONCURRENT_STREAMS: 2**31 - 1})
        h2.update_settings(
            {
                SettingCodes.MAX_CONCURRENT_STREAMS: MOST_STREAMS,
                SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW,
                SettingCodes.MAX_HEADER_LIST_SIZE: _Protocol.DEFAULT_MAX_HEADER_LIST_SIZE,
            }
        )
        h2.increment_flow_control_window(_CONNECTIONS_WINDOW - _FIRST_WINDOW)

    @property
    def held(self) -> int:
        """Bytes that the peer makes us hold."""
        return STREAM_BYTES * len(self.streams) + self._unread + self._pending + self._silent

    # output

    def take_output(self) -> bytes:
        """Return the bytes to write now. Wakes if there are more."""
        if self._is_closed:
            return b""
        self._put_out()
        if self._changed:
            self._wake()
        output, self._output = b"".join((*self._output, self._h2.data_to_send())), []
        return output

    def send(self, stream: Http2Stream, data: bytes) -> None:
        """Send data of a stream behind what waits there, and its end behind all."""
        if self.streams.get(stream.id) is not stream or stream.is_reset:
            return
        stream._pending += data
        self._pending += len(data)
        self._later(stream)

    def read(self, stream: Http2Stream, size: int) -> None:
        """`size` bytes of a stream have been read."""
        if self.streams.get(stream.id) is not stream:
            return
        stream._unread -= size
        self._unread -= size
        stream._owed += size
        if stream._owed >= _LEAST_UPDATE_BYTES and not stream.is_over:
            self._later(stream)

    def leave(self) -> None:
        """Say that no further stream is served."""
        if self._is_closed:
            return
        self._is_leaving = True
        self._put_out()
        self._output += (self._h2.data_to_send(), self._goaway(ErrorCodes.NO_ERROR))
        self._wake()

    def _goaway(self, code: ErrorCodes) -> bytes:
        """Return the frame by hand: the library sends nothing more after one of its own."""
        return _GOAWAY + self._h2.highest_inbound_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big")

    def close(self, code: ErrorCodes | None = None) -> bytes:
        """End all streams; return the last bytes to write. `code`: why the peer is left, None if it has gone."""
        if self._is_closed:
            return b""
        output = b"".join((*self._output, self._h2.data_to_send()))
        if code is not None and not self._has_said_why:
            output += self._goaway(code)
        self._is_closed = True
        for stream in list(self.streams.values()):
            self._reset(stream)
        self._silent = 0
        # Leave no cycle, since full garbage collections are rare here; the library's objects are one.
        self._changed.clear()
        vars(self._h2).clear()
        self._begun, self._wake = _ignored, _nothing
        return output

    def drop_pending(self, stream: Http2Stream) -> None:
        """Do not send what waits for room."""
        self._pending -= len(stream._pending)
        stream._pending.clear()

    def _later(self, stream: Http2Stream) -> None:
        self._changed[stream] = None
        self._wake()

    def _put_out(self) -> None:
        self._room = _MOST_OUTPUT_BYTES
        while self._changed and self._room > 0:
            stream = next(iter(self._changed))
            del self._changed[stream]
            if self.streams.get(stream.id) is stream:
                self._put_out_stream(stream)

    def _put_out_stream(self, stream: Http2Stream) -> None:
        if not stream.is_over:
            self._give_room(stream)
        if not stream._has_head and (stream._pending or stream._trailers is not None):
            stream._has_head = True
            if stream._pending:
                self._h2.send_headers(stream.id, _OK_HEADERS)
            else:
                stream._trailers = [*_OK_HEADERS, *(stream._trailers or ())]
        if stream._pending and not self._put_out_data(stream):
            (self._blocked if self._room > 0 else self._changed)[stream] = None
        elif stream._trailers is not None:
            self._h2.send_headers(stream.id, stream._trailers, end_stream=True)
            if not stream.is_over:  # the peer is to send nothing more
                self._h2.reset_stream(stream.id, ErrorCodes.NO_ERROR)
            self._forget(stream)

    def _put_out_data(self, stream: Http2Stream) -> bool:
        """Send what the peer, and this output, have room for. Return whether that is all."""
        h2, pending = self._h2, stream._pending
        before = len(pending)
        while pending and (room := min(h2.local_flow_control_window(stream.id), h2.max_outbound_frame_size)) > 0:
            if self._room <= 0:
                break
            h2.send_data(stream.id, piece := bytes(pending[:room]))
            del pending[:room]
            self._room -= len(piece)
            self._useful()
        self._pending -= before - len(pending)
        if len(pending) < before:
            stream.changed()
        return not pending

    def _give_room(self, stream: Http2Stream) -> None:
        """Let the peer send more, as much as was read, and the rest of a long message."""
        more = 0
        if stream._owed >= _LEAST_UPDATE_BYTES:
            more, stream._owed = stream._owed, 0
        room = self._h2.remote_flow_control_window(stream.id) + more
        lacks = stream._missing - room
        if lacks > 0:
            self._asking[stream] = None
            # A grant falls short if our settings made the window smaller since, or if data is padded.
            fits = next(iter(self._asking)) is stream and self._granted + lacks <= MOST_MESSAGE_BYTES
            if stream._granted or fits:
                stream._granted += lacks
                self._granted += lacks
                more += lacks
                self._ask_next(stream)
        if more:
            self._h2.increment_flow_control_window(more, stream.id)

    def _ask_next(self, stream: Http2Stream) -> None:
        """`stream` asks no more: consider the next one."""
        self._asking.pop(stream, None)
        for following in self._asking:
            self._changed[following] = None
            return

    def _take_back(self, stream: Http2Stream) -> None:
        """Take back the grant of a stream: the message for which a stream had or wanted a grant has come, or never
        comes: let others have theirs.
        """
        if stream._granted or stream in self._asking:
            self._granted -= stream._granted
            stream._owed -= stream._granted
            stream._granted = 0
            self._ask_next(stream)

    # input

    def receive(self, data: bytes) -> int:
        """Take in what the peer has sent. Return how many frames it was, about. Raises: ProtocolError: close."""
        try:
            events = self._h2.receive_data(data)
        except BrokenProtocol as error:
            self._has_said_why = True
            raise ProtocolError(str(error), ErrorCodes(error.error_code)) from error
        except Exception as error:  # whatever the library fails with, the peer has sent it
            raise ProtocolError(f"what was sent cannot be read: {error!r}") from error
        for event in events:
            _HANDLERS.get(type(event), Connection._on_idle)(self, event)
        if output := self._h2.data_to_send():
            self._output.append(output)
        resets = output.count(_RESET)  # the library's answers to frames of streams that are over, without an event
        self._idle_frames += resets
        self._silent = 0 if events or output else self._silent + len(data)
        self._require_calm()
        self._wake()
        return len(events) + resets

    def tick(self) -> None:
        """Look after the connection; to be called each second. Raises: ProtocolError: close."""
        self._ticks += 1
        self._early_resets = self._idle_frames = 0
        if not self._is_greeted and self._ticks >= GREETING_TICKS:
            raise ProtocolError("the peer did not greet", ErrorCodes.SETTINGS_TIMEOUT)
        if self.streams:
            self._used_at = self._ticks
        elif self._ticks - self._used_at >= UNUSED_TICKS:
            raise ProtocolError("the connection is not used", ErrorCodes.NO_ERROR)
        for stream in list(self.streams.values()):
            if not stream._is_begun and self._ticks - stream._opened_at >= FIRST_MESSAGE_TICKS:
                stream.fail(Status.DEADLINE_EXCEEDED, f"no message came within {FIRST_MESSAGE_TICKS} s")

    def _require_calm(self) -> None:
        if self._early_resets > MOST_EARLY_RESETS:
            raise ProtocolError("too many streams are reset at once", ErrorCodes.ENHANCE_YOUR_CALM)
        if self._idle_frames > MOST_IDLE_FRAMES:
            raise ProtocolError("too many frames carry nothing", ErrorCodes.ENHANCE_YOUR_CALM)
        if self._silent > _MOST_SILENT_BYTES:
            raise ProtocolError("headers have no end", ErrorCodes.ENHANCE_YOUR_CALM)

    def _useful(self) -> None:
        self._idle_frames = max(0, self._idle_frames - _USEFUL_WEIGHT)

    def _on_idle(self, event: object) -> None:
        self._idle_frames += 1

    def _on_data(self, event: DataReceived) -> None:
        size = event.flow_controlled_length
        self._owed += size
        if self._owed >= _CONNECTIONS_WINDOW // 2:
            self._h2.increment_flow_control_window(self._owed)
            self._owed = 0
        if not event.data and event.stream_ended is None:
            self._idle_frames += 1
        if (stream := self.streams.get(event.stream_id)) is None or stream.is_reset:
            return
        stream._owed += size - len(event.data)
        self._unread += len(event.data)
        if stream.receive(event.data):
            self._useful()
            self._take_back(stream)
            self._tell(stream)
        if stream._missing:
            self._changed[stream] = None

    def _on_request(self, event: RequestReceived) -> None:
        stream_id = event.stream_id
        if self._is_leaving or len(self.streams) >= MOST_STREAMS:
            self._early_resets += 1
            with suppress(NoSuchStreamError):  # it may be reset by the same input
                self._h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        path = next((bytes(value) for name, value in event.headers or () if name == b":path"), b"")
        self.streams[stream_id] = Http2Stream(self, stream_id, path.decode("latin-1"), self._ticks)

    def _on_end(self, event: StreamEnded) -> None:
        if (stream := self.streams.get(event.stream_id)) is not None:
            stream.is_over = True
            self._take_back(stream)
            self._tell(stream)

    def _tell(self, stream: Http2Stream) -> None:
        if not stream._is_begun:
            stream._is_begun = True
            self._begun(stream)
        else:
            stream.changed()

    def _on_reset(self, event: StreamReset) -> None:
        if (stream := self.streams.get(event.stream_id)) is None:
            self._idle_frames += 1
            return
        if not stream._has_head and stream._opened_at == self._ticks:
            self._early_resets += 1
        self._reset(stream)

    def _on_room(self, event: WindowUpdated | RemoteSettingsChanged) -> None:
        self._idle_frames += 1 if isinstance(event, WindowUpdated) else _SETTINGS_WEIGHT
        self._changed |= self._blocked
        self._blocked.clear()

    def _on_confirmed(self, event: SettingsAcknowledged) -> None:
        self._is_greeted = True
        self._idle_frames += 1
        # The windows of streams that are open have become smaller.
        self._changed |= {stream: None for stream in self.streams.values() if stream._missing}

    def _on_farewell(self, event: ConnectionTerminated) -> None:
        raise ProtocolError("the peer leaves", ErrorCodes.NO_ERROR)

    # a stream's end

    def _reset(self, stream: Http2Stream) -> None:
        stream.is_reset = stream.is_over = True
        changed = stream.changed
        self._forget(stream)
        changed()

    def _forget(self, stream: Http2Stream) -> None:
        self._take_back(stream)
        self._unread -= stream._unread
        self._pending -= len(stream._pending)
        self._blocked.pop(stream, None)
        del self.streams[stream.id]
        stream.changed = _nothing  # no cycle of the stream and its call is left


def _ignored(stream: Http2Stream) -> None:
    pass


_HANDLERS: MappingProxyType[type, Callable[[Connection, Any], None]] = MappingProxyType(
    {
        DataReceived: Connection._on_data,
        RequestReceived: Connection._on_request,
        StreamEnded: Connection._on_end,
        StreamReset: Connection._on_reset,
        WindowUpdated: Connection._on_room,
        RemoteSettingsChanged: Connection._on_room,
        SettingsAcknowledged: Connection._on_confirmed,
        ConnectionTerminated: Connection._on_farewell,
    }
)
