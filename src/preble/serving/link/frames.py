"""Messages on a stream, each after its length. One write sends all messages of one turn of the event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from struct import Struct
from typing import Any, Generic, TypeVar, cast

import msgspec
import structlog

from preble.serving.link.protocol import Message

LENGTH = Struct("<I")
MOST_BYTES = 256 * 1024 * 1024
"""The longest message: more than the token ids of any body that the gateway takes."""
_ENCODE = msgspec.msgpack.Encoder().encode

M = TypeVar("M", bound=Message)


class FrameProtocol(asyncio.Protocol, ABC, Generic[M]):
    """One end of a connection. A malformed message, or an exception in `received`, ends the connection."""

    def __init__(self, kind: Any) -> None:
        """`kind`: the union of the messages that may come."""
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._loop = asyncio.get_running_loop()
        self._arrived = bytearray()
        self._out: list[bytes] = []
        self._is_due = False
        """Whether `_flush` will be called in this turn of the event loop."""
        self._is_taking = False
        """Whether messages that have come are being read: the answers to all of them are sent together."""
        self._transport: asyncio.Transport | None = None

    @abstractmethod
    def received(self, message: M) -> None:
        """A message has come."""

    @abstractmethod
    def ended(self) -> None:
        """The connection is over. Called once, even if no message came."""

    def send(self, message: Message) -> None:
        """Send a message, with the others of this turn of the event loop. Drops it if the connection is over."""
        if self._transport is not None:
            self._flush_soon()
            self._put(message)

    def _flush_soon(self) -> None:
        if not self._is_due and not self._is_taking:
            self._is_due = True
            self._loop.call_soon(self._flush)

    def _put(self, message: Message) -> None:
        frame = _ENCODE(message)
        self._out += (LENGTH.pack(len(frame)), frame)

    def finish(self) -> None:
        """End the connection once everything is sent."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def close(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def dropped(self) -> None:
        """Its making was cancelled: the transport is closed, and says nothing."""
        if self._transport is not None:
            self.connection_lost(None)

    def _flush(self) -> None:
        self._is_due = False
        if self._out and self._transport is not None:
            self._transport.write(b"".join(self._out))
            if (unread := self._transport.get_write_buffer_size()) > MOST_BYTES:
                structlog.get_logger().error("link_unread", bytes=unread, consequence="the connection ends")
                self.close()
        self._out.clear()

    # from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport derives from no class of asyncio

    def data_received(self, data: bytes) -> None:
        arrived: bytes | bytearray = data
        if self._arrived:
            self._arrived += data
            arrived = self._arrived
        self._is_taking = True
        try:
            taken = self._take(arrived)
        except Exception as error:  # noqa: BLE001 (the peer's bytes must end no more than this connection)
            is_theirs = isinstance(error, (msgspec.DecodeError, UnicodeDecodeError))
            structlog.get_logger().error("link_broken", error=str(error), exc_info=None if is_theirs else error)
            self.close()
            return
        finally:
            self._is_taking = False
        if arrived is data:
            self._arrived += data[taken:]
        else:
            del self._arrived[:taken]
        self._flush()

    def _take(self, arrived: bytes | bytearray) -> int:
        """Read the messages that are whole; return how many bytes they took."""
        at, size_arrived = 0, len(arrived)
        with memoryview(arrived) as view:
            while size_arrived >= at + LENGTH.size:
                [size] = LENGTH.unpack_from(view, at)
                if size > MOST_BYTES:
                    raise msgspec.DecodeError(f"a message of {size} bytes; at most {MOST_BYTES} are accepted")
                end = at + LENGTH.size + size
                if size_arrived < end:
                    break
                with view[at + LENGTH.size : end] as frame:
                    message = self._decoded(frame)
                self.received(message)
                at = end
        return at

    def _decoded(self, frame: memoryview) -> M:
        try:
            message: M = self._decode(frame)
        except RecursionError as error:
            raise msgspec.DecodeError("a message is nested too deeply") from error
        return message

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._arrived.clear()  # transport and protocol are a cycle, which only a full collection frees
        self.ended()
