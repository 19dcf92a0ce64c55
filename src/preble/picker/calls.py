"""gRPC calls over asyncio: a server of methods, each a coroutine that reads and writes encoded messages."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from socket import socket
from typing import cast

import structlog

from preble.picker.http2 import Connection, ProtocolError, Status, Stream

_MOST_PENDING_BYTES = 256 * 1024
"""A method that writes more than the peer takes waits."""
_ABORT_S = 5.0


class CallError(Exception):
    """The call ends with a status other than OK, and a text for its caller."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status


class Call:
    """One call, as its method sees it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._waiter: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None
        stream.changed = self._changed

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
        while self._stream.num_pending > _MOST_PENDING_BYTES:
            await self._change()

    async def _change(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _changed(self) -> None:
        if self._stream.is_reset and self.task is not None:
            self.task.cancel()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


Method = Callable[[Call], Awaitable[None]]


class _Peer(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: CallServer) -> None:
        self._server = server
        self._is_woken = False
        self._calls: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = cast("asyncio.Transport", transport)
        self.connection = Connection(self._opened, self._wake)
        self._server.peers.add(self)
        self._write()

    def data_received(self, data: bytes) -> None:
        try:
            self.connection.receive(data)
        except ProtocolError as error:
            structlog.get_logger().warning("call_protocol_error", error=str(error))
            self._write()
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.peers.discard(self)
        self.abort()

    def pause_writing(self) -> None:
        """Read nothing more from a peer that reads nothing, so that our buffers stay bounded."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def abort(self) -> None:
        """End all calls."""
        for task in self._calls:
            task.cancel()

    def close(self) -> None:
        self._write()
        self._transport.close()

    @property
    def calls(self) -> frozenset[asyncio.Task[None]]:
        return frozenset(self._calls)

    def _opened(self, stream: Stream) -> None:
        call = Call(stream)
        call.task = task = self._loop.create_task(self._run(call, stream))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _run(self, call: Call, stream: Stream) -> None:
        status, text = Status.OK, ""
        try:
            method = self._server.methods.get(stream.path)
            if method is None:
                raise CallError(Status.UNIMPLEMENTED, f"there is no method {stream.path[:100]}")
            await method(call)
        except CallError as error:
            status, text = error.status, str(error)
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
        if (output := self.connection.take_output()) and not self._transport.is_closing():
            self._transport.write(output)


class CallServer:
    """Serves methods by path."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        self.methods = methods
        self.peers: set[_Peer] = set()
        self._server: asyncio.Server | None = None

    async def start(self, sock: socket, tls: ssl.SSLContext | None) -> None:
        """Serve on a listening socket."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Peer(self), sock=sock, ssl=tls)

    async def stop(self, grace_s: float) -> None:
        """Take no further calls, let those that run end for `grace_s`, then end them."""
        assert self._server is not None
        self._server.close()
        for peer in self.peers:
            peer.connection.leave()
        if running := [task for peer in self.peers for task in peer.calls]:
            await asyncio.wait(running, timeout=grace_s)
        for peer in self.peers:
            peer.abort()
        if running := [task for peer in self.peers for task in peer.calls]:
            await asyncio.wait(running, timeout=_ABORT_S)
        for peer in list(self.peers):
            peer.close()
