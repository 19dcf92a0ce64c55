"""ZMQ's protocol as a subscriber and a dealer speak it: bytes in, messages and answers out. No sockets, no clock.

libzmq does its input in a thread of its own: each message wakes that thread and then ours, which queries it five
times. On a connection of our own event loop a message costs a fraction of that. This module leaves out what
publishers of KV events do not use: mechanisms other than NULL, versions before 3, other kinds of sockets.

Source: ZMTP 3.1, https://rfc.zeromq.org/spec/37.
"""

from __future__ import annotations

from typing import Final

_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_NULL: Final = b"NULL".ljust(20, b"\0")
_GREETING_BYTES: Final = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_MAX_CONTEXT_BYTES: Final = 16
"""Of what a ping gives to be sent back."""

_FRAME_OVERHEAD: Final = 64
"""Counted for each frame of a message beside its content, so that empty ones cannot fill the memory either."""

GREETING: Final = (_SIGNATURE + b"\x03\x01" + _NULL).ljust(_GREETING_BYTES, b"\0")
"""What each side sends first."""


class NotZmtp(Exception):
    """The peer sends what no publisher sends, or a message that is too large."""


class ZmtpPeer:
    """Our side of one connection. Send `GREETING` first. `subscriber` and `dealer` make it.

    `is_ready`: the handshake is over, and the opening sent.
    """

    def __init__(self, kind: bytes, other: bytes, opening: bytes, max_bytes: int) -> None:
        """`kind`: of socket that we are. `other`: kind that the peer must be. `opening`: sent when it is ready.

        `max_bytes`: of one message.
        """
        self.is_ready = False
        self._kind = kind
        self._other = other
        self._opening = opening
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._has_greeting = False
        self._frames: list[bytes] = []
        self._frames_bytes = 0

    @property
    def is_within_message(self) -> bool:
        """Whether a part of a message has arrived, and more of it is to come."""
        return bool(self._buffer or self._frames)

    def feed(self, data: bytes) -> tuple[list[list[bytes]], bytes]:
        """Take in what has arrived. Returns the messages that it completes, as lists of frames, and what to answer.

        Raises: NotZmtp: the connection is of no use any more.
        """
        messages: list[list[bytes]] = []
        if self._has_greeting and not self._buffer:
            at, answer = self._take_frames(data, messages)
            self._buffer += data[at:]
            return messages, answer
        self._buffer += data
        greeted = b"" if self._has_greeting else self._take_greeting()
        if not self._has_greeting:
            return messages, greeted
        with memoryview(self._buffer) as view:
            at, answer = self._take_frames(view, messages)
        del self._buffer[:at]
        return messages, greeted + answer

    def _take_greeting(self) -> bytes:
        """Return what to answer once it is there. Raises: NotZmtp."""
        greeting = bytes(self._buffer[:_GREETING_BYTES])
        if not greeting.startswith(b"\xff"):
            raise NotZmtp("it does not greet as ZMQ does")
        if len(greeting) < _GREETING_BYTES:
            return b""
        if greeting[9] != _SIGNATURE[9] or greeting[10] < 3 or greeting[12:32] != _NULL:
            raise NotZmtp("it speaks a version before 3, or asks for authentication")
        del self._buffer[:_GREETING_BYTES]
        self._has_greeting = True
        return _command(b"READY", b"\x0bSocket-Type" + len(self._kind).to_bytes(4, "big") + self._kind)

    def _take_frames(self, data: bytes | memoryview, messages: list[list[bytes]]) -> tuple[int, bytes]:
        """Add the messages that are complete in `data`. Returns how much of it is used up, and what to answer.

        Raises: NotZmtp.
        """
        at, size, answer = 0, len(data), b""
        while at + 2 <= size:
            flags, num_bytes, start = data[at], data[at + 1], at + 2
            if flags & _LONG:
                start = at + 9
                if start > size:
                    break
                num_bytes = int.from_bytes(data[at + 1 : start], "big")
            if flags > (_MORE | _LONG | _COMMAND) or num_bytes > self._max_bytes:
                raise NotZmtp(f"a frame of {num_bytes} bytes with the flags {flags}")
            end = start + num_bytes
            if end > size:
                break
            content, at = bytes(data[start:end]), end
            if flags & _COMMAND:
                answer += self._answer_to(content)
            else:
                self._add(content)
                if not flags & _MORE:
                    messages.append(self._frames)
                    self._frames, self._frames_bytes = [], 0
        return at, answer

    def _add(self, content: bytes) -> None:
        """Add a frame to the message that it belongs to. Raises: NotZmtp."""
        if not self.is_ready:
            raise NotZmtp("a message before the handshake is over")
        self._frames.append(content)
        self._frames_bytes += len(content) + _FRAME_OVERHEAD
        if self._frames_bytes > self._max_bytes + _GREETING_BYTES * _FRAME_OVERHEAD:
            raise NotZmtp("a message of too many bytes")

    def _answer_to(self, command: bytes) -> bytes:
        """Raises: NotZmtp: it refuses us, or it is another kind of socket."""
        name, data = command[1 : 1 + command[0]] if command else b"", command[1 + command[0] :] if command else b""
        if name == b"READY":
            if self._other not in data:
                raise NotZmtp(f"its kind of socket is not {self._other.decode()}")
            self.is_ready = True
            return self._opening
        if name == b"ERROR":
            raise NotZmtp(f"it refuses the connection: {data[1:].decode(errors='replace')}")
        return _command(b"PONG", data[2 : 2 + _MAX_CONTEXT_BYTES]) if name == b"PING" else b""


def subscriber(topic: bytes, max_bytes: int) -> ZmtpPeer:
    """Return the side of a subscriber to messages that begin with `topic`."""
    return ZmtpPeer(b"SUB", b"PUB", _frame(b"\x01" + topic), max_bytes)


def dealer(request: list[bytes], max_bytes: int) -> ZmtpPeer:
    """Return the side that sends a router one request, of these frames, and takes any number of messages for it."""
    more = b"".join([_frame(frame, _MORE) for frame in request[:-1]])
    return ZmtpPeer(b"DEALER", b"ROUTER", more + _frame(request[-1]), max_bytes)


def _command(name: bytes, data: bytes) -> bytes:
    return _frame(bytes([len(name)]) + name + data, _COMMAND)


def _frame(content: bytes, flags: int = 0) -> bytes:
    if len(content) < 256:
        return bytes([flags, len(content)]) + content
    return bytes([flags | _LONG]) + len(content).to_bytes(8, "big") + content


PING: Final = _command(b"PING", bytes(2))
"""Asks the peer for a sign of life. With a time in place of the zeros it would end the connection if it then heard
nothing of us for so long, and we say nothing while it is busy."""
