"""A peer of the picker that keeps to no rule: frames by hand, over a socket of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress

from hpack import Decoder, Encoder
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame, SettingsFrame

from preble.picker.envoy import SERVICE

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PROCESS = f"/{SERVICE}/Process"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
FRAME_BYTES = 16 * 1024


def headers(path: str = PROCESS) -> bytes:
    """Return a block of a call's headers, which no dynamic table is needed for."""
    pairs = [(":method", "POST"), (":path", path), (":scheme", "http"), (":authority", "picker")]
    encoder = Encoder()
    encoder.header_table_size = 0
    return bytes(encoder.encode([*pairs, ("content-type", "application/grpc"), ("te", "trailers")]))


def opened(stream_id: int, path: str = PROCESS) -> bytes:
    """Return the frame that opens a stream."""
    return HeadersFrame(stream_id, headers(path), flags=["END_HEADERS"]).serialize()


def reset(stream_id: int) -> bytes:
    return RstStreamFrame(stream_id, error_code=8).serialize()


def data(stream_id: int, payload: bytes, *, ends: bool = False) -> bytes:
    return DataFrame(stream_id, payload, flags=["END_STREAM"] if ends else []).serialize()


def message(content: bytes, length: int | None = None) -> bytes:
    """Return a message of gRPC, or its beginning. `length`: what its head says."""
    return b"\0" + (len(content) if length is None else length).to_bytes(4, "big") + content


class HostilePeer:
    """One connection. `goaway`: the code with which the picker has left it. `statuses`: of calls, by stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = Decoder()
        self.goaway: int | None = None
        self.is_closed = False
        self.is_greeted = False
        self.statuses: dict[int, int] = {}

    async def send(self, frames: bytes | Iterable[bytes]) -> None:
        """Send as much as the picker takes: nothing more once it has closed the connection."""
        with suppress(ConnectionError):
            for frame in [frames] if isinstance(frames, bytes) else frames:
                await asyncio.sleep(0)  # `drain` alone lets nobody else run while there is room
                if self.is_closed or self._writer.transport.is_closing():
                    return
                self._writer.write(frame)
                await self._writer.drain()

    async def read(self, *, confirms: bool) -> None:
        """Read until the connection is closed. `confirms`: the picker's settings."""
        with suppress(ConnectionError, asyncio.IncompleteReadError), closing(self):
            while True:
                head = await self._reader.readexactly(9)
                frame, length = Frame.parse_frame_header(memoryview(head))
                frame.parse_body(memoryview(await self._reader.readexactly(length)))
                if isinstance(frame, SettingsFrame) and "ACK" not in frame.flags and confirms:
                    await self.send(SettingsFrame(0, flags=["ACK"]).serialize())
                    self.is_greeted = True
                self._on(frame)

    def _on(self, frame: Frame) -> None:
        match frame:
            case GoAwayFrame():
                self.goaway = frame.error_code
            case HeadersFrame():
                found = dict(self._decoder.decode(frame.data))
                if "grpc-status" in found:
                    self.statuses[frame.stream_id] = int(found["grpc-status"])

    def close(self) -> None:
        self.is_closed = True
        self._writer.transport.abort()


@asynccontextmanager
async def peers(port: int, count: int, *, greet: bool = True) -> AsyncIterator[list[HostilePeer]]:
    """Connections to a picker, which read all that it sends."""
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            peer = HostilePeer(*await asyncio.open_connection("127.0.0.1", port))
            stack.callback(peer.close)
            found.append(peer)
            if greet:
                await peer.send(PREFACE + SettingsFrame(0).serialize())
        reading = [asyncio.create_task(peer.read(confirms=greet)) for peer in found]
        try:
            yield found
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
