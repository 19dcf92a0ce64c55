"""gRPC calls over asyncio: a server of methods, each a coroutine that reads and writes encoded messages.

What a peer may take of one connection is bounded in `http2`; here is what all may take together. Whoever makes us hold
the most is left first, so a peer that takes much makes room for the others by its own end.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from functools import partial
from math import inf
from socket import socket
from types import MappingProxyType
from typing import cast

import structlog
from h2.errors import ErrorCodes

from preble.picker.handshakes import Handshakes
from preble.picker.http2 import Connection, Http2Stream, ProtocolError, Status

MOST_CONNECTIONS = 512
"""Beyond them the connection that has been open for longest without a stream makes room."""
MOST_HELD_BYTES = 48 * 1024 * 1024
"""The most that all connections may make us hold. A stream counts, too: 6,144 of them, more than may be in flight."""
TICK_S = 1.0
"""The limits of `http2` that have to do with time are meant for ticks of one second."""
TELL_EVERY_S = 60.0
"""Between two log lines about the same refusal."""
_MOST_PENDING_BYTES = 64 * 1024
"""A method that writes more than the peer takes waits."""
_PIECE_BYTES = 16 * 1024
_MOST_FRAMES = 64
"""After a piece of input with more frames others have their turn."""
_ABORT_S = 5.0
_END_S = 5.0
"""So long a peer that is left may take to read why."""


class Refusal(StrEnum):
    """Why the server refuses something to a peer: the values of a metric's label."""

    PROTOCOL = "protocol"
    FLOOD = "flood"
    MEMORY = "memory"
    SILENT = "silent"
    CONNECTIONS = "connections"
    MESSAGE = "message"


_REFUSALS = MappingProxyType({ErrorCodes.ENHANCE_YOUR_CALM: Refusal.FLOOD, ErrorCodes.SETTINGS_TIMEOUT: Refusal.SILENT})


class CallError(Exception):
    """The call ends with a status other than OK, and a text for its caller."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status


class PickerCall:
    """One call, as its method sees it."""

    def __init__(self, peer: _GatewayConnection, stream: Http2Stream) -> None:
        self._peer = peer
        self._stream = stream
        self._waiter: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None
        stream.changed = self.changed

    async def read(self) -> bytes | None:
        """Return the next message, None after the last one."""
        stream = self._stream
        while not stream.messages:
            if stream.is_over:
                return None
            await self._change()
        return stream.take()

    async def write(self, message: bytes) -> None:
        """Send a message. Waits while the peer takes nothing."""
        self._stream.send(message)
        while self._stream.num_pending > _MOST_PENDING_BYTES or self._peer.is_full:
            await self._change()

    @property
    def num_alike(self) -> int:
        """How many earlier calls of this method the connection has."""
        own, streams = self._stream, self._peer.connection.streams.values()
        return sum(stream.path == own.path and stream.id < own.id for stream in streams)

    async def _change(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def changed(self) -> None:
        """The stream has changed, or the peer takes bytes again."""
        if self._stream.is_reset and self.task is not None:
            self.task.cancel()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


Method = Callable[[PickerCall], Awaitable[None]]


class _GatewayConnection(asyncio.Protocol):
    """One connection. `is_full`: the peer reads nothing of what we write. `counted`: `held`, as the server has it."""

    def __init__(self, server: CallServer) -> None:
        self._server = server
        self._is_woken = False
        self._input = b""
        self._reads = True
        self._end: asyncio.TimerHandle | None = None
        self._calls: dict[asyncio.Task[None], PickerCall] = {}
        self.is_full = False
        self.counted = 0

    @property
    def held(self) -> int:
        """Bytes that the peer makes us hold."""
        return len(self._input) + self.connection.held + self._transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = cast("asyncio.Transport", transport)
        self.connection = Connection(self._begun, self._wake)
        self._server.entered(self)
        self._write()

    def data_received(self, data: bytes) -> None:
        waits = bool(self._input)
        self._input += data
        if not waits:
            self._take_in()

    def _take_in(self) -> None:
        """Take input in by pieces, so that small frames hold up nobody."""
        while self._input and self._end is None:
            piece, self._input = self._input[:_PIECE_BYTES], self._input[_PIECE_BYTES:]
            try:
                num_frames = self.connection.receive(piece)
            except ProtocolError as error:
                self.end(error.code, str(error))
                return
            self._server.count(self)
            if self._input and num_frames > _MOST_FRAMES:
                self._loop.call_soon(self._take_in)
                break
        self._read_on()

    def connection_lost(self, error: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
        self._input = b""
        self.abort()
        self.connection.close()
        self._server.left(self)

    def pause_writing(self) -> None:
        """Read nothing more from a peer that reads nothing, so that our buffers stay bounded."""
        self.is_full = True
        self._read_on()

    def resume_writing(self) -> None:
        self.is_full = False
        self._wake()
        for call in self._calls.values():
            call.changed()
        self._read_on()

    def _read_on(self) -> None:
        reads = not self.is_full and not self._input
        if reads != self._reads and not self._transport.is_closing():
            self._reads = reads
            (self._transport.resume_reading if reads else self._transport.pause_reading)()

    def tick(self) -> None:
        """Look after the connection, each second."""
        try:
            self.connection.tick()
        except ProtocolError as error:
            self.end(error.code, str(error))

    def end(self, code: ErrorCodes, text: str, refusal: Refusal | None = None) -> None:
        """Leave the peer, and tell it why."""
        if self._end is not None:
            return
        self._end = self._loop.call_later(_END_S, self._transport.abort)
        self._input = b""
        self._transport.write(self.connection.close(code))
        self._transport.close()
        if self.is_full:  # it does not read why either
            self._transport.abort()
        self._server.count(self)
        if code is not ErrorCodes.NO_ERROR:
            self._server.refused(refusal or _REFUSALS.get(code, Refusal.PROTOCOL), text)

    def abort(self) -> None:
        """End all calls."""
        for task in self._calls:
            task.cancel()

    def close(self) -> None:
        """Close the connection once everything is sent."""
        while output := self.connection.take_output():
            self._transport.write(output)
        self._transport.close()

    @property
    def calls(self) -> frozenset[asyncio.Task[None]]:
        return frozenset(self._calls)

    def _begun(self, stream: Http2Stream) -> None:
        call = PickerCall(self, stream)
        call.task = task = self._loop.create_task(self._run(call, stream))
        self._calls[task] = call
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._calls.pop(task).task = None

    async def _run(self, call: PickerCall, stream: Http2Stream) -> None:
        status, text = Status.OK, ""
        try:
            method = self._server.methods.get(stream.path)
            if method is None:
                raise CallError(Status.UNIMPLEMENTED, f"there is no method {stream.path[:100]}")
            await method(call)
        except CallError as error:
            status, text = error.status, str(error)
            if status is Status.INVALID_ARGUMENT:
                self._server.refused(Refusal.MESSAGE, text)
        except asyncio.CancelledError:
            status, text = Status.CANCELLED, "the server ends"
        except Exception:  # noqa: BLE001 (a task's root: one call's failure must not end the others)
            structlog.get_logger().exception("call_failed", method=stream.path)
            status, text = Status.INTERNAL, "the picker failed; its log has the details"
        if not stream.is_reset:
            stream.close(status, text)

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        self._is_woken = False
        if not self.is_full and not self._transport.is_closing() and (output := self.connection.take_output()):
            self._transport.write(output)
        self._server.count(self)


class CallServer:
    """Serves methods by path. `told`: called for each refusal."""

    def __init__(self, methods: Mapping[str, Method], told: Callable[[Refusal], None]) -> None:
        self.methods = methods
        self.peers: dict[_GatewayConnection, None] = {}
        """The connections, the oldest first."""
        self._told = told
        self._held = 0
        self._untold: Counter[Refusal] = Counter()
        self._told_at: dict[Refusal, float] = {}
        self._server: asyncio.Server | None = None
        self._handshakes: Handshakes | None = None

    async def start(self, sock: socket, tls: ssl.SSLContext | None) -> None:
        """Serve on a listening socket."""
        if tls is None:
            self._server = await asyncio.get_running_loop().create_server(partial(_GatewayConnection, self), sock=sock)
        else:
            self._handshakes = Handshakes(sock, tls, partial(_GatewayConnection, self), self._too_many_handshakes)
            self._handshakes.begin()

    def _too_many_handshakes(self) -> None:
        self.refused(Refusal.CONNECTIONS, "there are too many TLS handshakes")

    async def look_after(self) -> None:
        """End connections and calls that keep to no limit of time. Never returns."""
        while True:
            await asyncio.sleep(TICK_S)
            for peer in [*self.peers]:
                peer.tick()

    async def stop(self, grace_s: float) -> None:
        """Take no further calls, let those that run end for `grace_s`, then end them."""
        if self._server is not None:
            self._server.close()
        if self._handshakes is not None:
            self._handshakes.end()
        for peer in self.peers:
            peer.connection.leave()
        if running := [task for peer in self.peers for task in peer.calls]:
            await asyncio.wait(running, timeout=grace_s)
        for peer in self.peers:
            peer.abort()
        if running := [task for peer in self.peers for task in peer.calls]:
            await asyncio.wait(running, timeout=_ABORT_S)
        for peer in [*self.peers]:
            peer.close()

    # what all connections take together

    def entered(self, peer: _GatewayConnection) -> None:
        """A connection has come."""
        if len(self.peers) >= MOST_CONNECTIONS:
            unused = next((one for one in self.peers if not one.connection.streams), peer)
            self.peers.pop(unused, None)
            unused.end(ErrorCodes.ENHANCE_YOUR_CALM, "there are too many connections", Refusal.CONNECTIONS)
            if unused is peer:
                return
        self.peers[peer] = None

    def left(self, peer: _GatewayConnection) -> None:
        """A connection is over."""
        self.peers.pop(peer, None)
        self._count(peer, 0)

    def count(self, peer: _GatewayConnection) -> None:
        """Count what a connection makes us hold now."""
        self._count(peer, peer.held)
        if self._held <= MOST_HELD_BYTES:
            return
        for one in self.peers:  # what was to be written may have gone
            self._count(one, one.held)
        if self._held > MOST_HELD_BYTES:
            heaviest = max(self.peers, key=lambda one: one.counted)
            heaviest.end(ErrorCodes.ENHANCE_YOUR_CALM, "the connection takes too much memory", Refusal.MEMORY)

    def _count(self, peer: _GatewayConnection, held: int) -> None:
        self._held += held - peer.counted
        peer.counted = held

    def refused(self, refusal: Refusal, text: str) -> None:
        """Count a refusal, and log one of each kind in a while."""
        self._told(refusal)
        self._untold[refusal] += 1
        now = asyncio.get_running_loop().time()
        if now - self._told_at.get(refusal, -inf) >= TELL_EVERY_S:
            self._told_at[refusal] = now
            times = self._untold.pop(refusal)
            structlog.get_logger().warning("call_refused", refusal=str(refusal), error=text, times=times)
