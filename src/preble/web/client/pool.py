"""A pool of connections to one server. Each carries one exchange at a time, and is used again.

The meaning of a failure depends on when it happens. No connection was made: the server has done nothing
(`EngineRefused`). The connection broke after the request went out: the server may have worked (`EngineGone`). A third
case looks like the second: the server closed an idle connection just as the pool used it again. Such a connection
breaks at once, before any byte of an answer. So the pool sends a request that fails like that once more.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Protocol

from aiohappyeyeballs import AddrInfoType, start_connection

from preble.errors import EngineError, EngineGone, EngineProtocolError, EngineRefused
from preble.web.messages import AnswerReader, BadAnswer, HeaderList

STALE_WINDOW_S = 1.0
"""A kept connection that was closed for idleness fails within a round trip; later failures are the server's."""
_NEXT_ADDRESS_S = 0.25
"""After this long a server's second address is tried (RFC 8305)."""
_KNOWN_S = 10.0
"""How long resolved addresses of a name are used."""

MakeError = Callable[..., EngineError]
"""Makes an error that names the server, from a class, what happened, and `is_silent`: its machine sent nothing."""


class Receiver(Protocol):
    """Gets the answer to a request. Nothing is called after the first `ended` or `failed`, or after an abort."""

    def answered(self, status: int, headers: HeaderList) -> None:
        """The head of the answer has come. `headers`: names in lower case."""

    def received(self, data: bytes) -> None:
        """More of the body: all bytes that came together."""

    def ended(self) -> None:
        """The answer is complete."""

    def failed(self, error: EngineError) -> None:
        """There is no answer, or its rest will not come."""


class Ongoing(Protocol):
    """A request that was sent, while its answer comes."""

    def pause(self) -> None:
        """Read no more of the answer, so that the server waits."""

    def resume(self) -> None:
        """Read on."""

    def abort(self) -> None:
        """Close the connection, so that the server stops its work. Does nothing if the answer is complete or failed."""


class Exchange:
    """One request and its answer, an `Ongoing`. `ConnectionPool.begin` and `begin_streamed` make it."""

    __slots__ = (
        "_connection",
        "_dialing",
        "_is_on_kept",
        "_is_second",
        "_on_unfinished",
        "_pool",
        "_sent_at",
        "has_head",
        "has_more",
        "on_connected",
        "receiver",
        "request",
    )

    def __init__(
        self,
        pool: ConnectionPool,
        request: tuple[bytes, bytes],
        receiver: Receiver,
        on_unfinished: Callable[[], None] | None,
        now: float,
    ) -> None:
        self._pool = pool
        self._connection: _Connection | None = None
        self._dialing: asyncio.Task[None] | None = None
        self._is_on_kept = self._is_second = False
        self._on_unfinished = on_unfinished
        self.receiver: Receiver | None = receiver
        """None once the exchange is over."""
        self.request: tuple[bytes, bytes] = request
        self._sent_at = now
        self.has_head = False
        """Whether the head of the answer has come."""
        self.has_more = False
        """Whether more of the request's body is to come, by `write`."""
        self.on_connected: asyncio.Future[None] | None = None
        """Of a streamed request: done when its head has gone out, or the exchange is over."""

    def pause(self) -> None:
        if self._connection is not None and not self._connection.transport.is_closing():
            self._connection.transport.pause_reading()

    def resume(self) -> None:
        if self._connection is not None and not self._connection.transport.is_closing():
            self._connection.transport.resume_reading()

    def abort(self) -> None:
        if self.receiver is None:
            return
        connection, dialing = self._connection, self._dialing
        self._over()
        if dialing is not None:
            dialing.cancel()
        if connection is not None:
            connection.exchange = None
            connection.transport.abort()
        self._unfinished()

    async def write(self, data: bytes, *, is_last: bool = False) -> bool:
        """Send more of a streamed request's body; waits for the connection, and while the server reads slowly.

        Returns whether the server may want more of it: False once the exchange is over.
        """
        if self.on_connected is not None:
            await asyncio.wait([self.on_connected])
        if self._connection is not None:
            self._connection.transport.write(data)
            self.has_more = not is_last
            await self._connection.can_write.wait()
        return self.receiver is not None

    # called by the pool and its connections

    def use(self, connection: _Connection, *, is_kept: bool = False) -> None:
        self._dialing = None
        self._is_on_kept = is_kept
        self._connection = connection
        connection.send(self)
        self._connected()

    def _connected(self) -> None:
        if self.on_connected is not None and not self.on_connected.done():
            self.on_connected.set_result(None)

    def dial(self) -> None:
        self._dialing = asyncio.get_running_loop().create_task(self._pool.dial(self))

    def ended(self) -> None:
        if (receiver := self._over()) is not None:
            receiver.ended()

    def failed(self, kind: type[EngineError], what: str, *, is_silent: bool = False) -> None:
        if (receiver := self._over()) is not None:
            self._unfinished()
            receiver.failed(self._pool.error(kind, what, is_silent=is_silent))

    def broke(self, why: str, now: float) -> None:
        """The connection is gone, and no head has come."""
        self._connection = None
        if not self._is_on_kept or now - self._sent_at > STALE_WINDOW_S or self._pool.is_closed:
            self.failed(EngineGone, f"broke the connection before it answered: {why}")
            return
        self._is_second = True
        self.dial()

    def refused(self, why: str, *, is_silent: bool) -> None:
        if self._is_second:
            # The server took the request the first time. It may have worked on it, or died of it.
            self.failed(EngineGone, "broke the connection and accepts no new one")
        else:
            self.failed(EngineRefused, f"cannot be reached: {why}", is_silent=is_silent)

    def _over(self) -> Receiver | None:
        """Drop all references. Return the receiver to call, None if the exchange was over before."""
        receiver, self.receiver = self.receiver, None
        self._connection = self._dialing = None
        self.request = (b"", b"")
        self._connected()
        return receiver

    def _unfinished(self) -> None:
        call, self._on_unfinished = self._on_unfinished, None
        if call is not None:
            call()


class _Connection(asyncio.Protocol):
    """One connection. `exchange`: the one that runs on it, None while the connection is idle."""

    transport: asyncio.Transport

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._reader = AnswerReader()
        self.exchange: Exchange | None = None
        self.idle_since = 0.0
        self.can_write = asyncio.Event()
        self.can_write.set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._pool.connections.add(self)

    def send(self, exchange: Exchange) -> None:
        self.exchange = exchange
        # Not `writelines`: in Python 3.12 and 3.13.0 an empty part stays in its buffer, and the connection never ends.
        for part in exchange.request:
            self.transport.write(part)

    def data_received(self, data: bytes) -> None:
        exchange, reader = self.exchange, self._reader
        if exchange is None or exchange.receiver is None:  # the server sends something without a request
            self.transport.abort()
            return
        try:
            body = reader.feed(data)
        except BadAnswer as error:
            self._close()
            exchange.failed(EngineProtocolError, f"does not answer in HTTP ({error})")
            return
        if reader.has_head and not exchange.has_head:
            exchange.has_head = True
            exchange.request = (b"", b"")  # it will not be sent again
            exchange.receiver.answered(reader.status, reader.headers)
        if body and exchange.receiver is not None:
            exchange.receiver.received(body)
        if reader.is_complete and self.exchange is exchange:
            self._done(exchange)

    def _done(self, exchange: Exchange) -> None:
        self.exchange = None
        if self._reader.can_go_on and not exchange.has_more and not self.transport.is_closing():
            self.transport.resume_reading()
            self._pool.keep(self)
        else:
            self.transport.abort()
        exchange.ended()

    def pause_writing(self) -> None:
        self.can_write.clear()

    def resume_writing(self) -> None:
        self.can_write.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.can_write.set()
        self._pool.forget(self)
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            if not exchange.has_head:
                exchange.broke(_why(error), self._pool.now())
            elif self._reader.eof():
                exchange.ended()
            else:
                exchange.failed(EngineGone, f"broke off in the middle of its answer ({_why(error)})")
        self._reader.close()

    def _close(self) -> None:
        self.exchange = None
        self.transport.abort()


def _why(error: Exception | None) -> str:
    return "Server disconnected" if error is None else str(error) or type(error).__name__


class ConnectionPool:
    """The connections to one server. Use it within one event loop, which must run from the first exchange on.

    `tls`: None for plain HTTP. `connect_s`: the longest time to connect. `keep_s`: how long an idle one is kept.
    `error`: see `MakeError`. `why`: returns in words why connecting failed, and whether the machine is silent.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None,
        connect_s: float,
        keep_s: float,
        error: MakeError,
        why: Callable[[BaseException], tuple[str, bool]],
    ) -> None:
        self._address = (host, port)
        self._tls = tls
        self._connect_s = connect_s
        self._keep_s = keep_s
        self._why = why
        self.error = error
        self.is_closed = False
        self.connections: set[_Connection] = set()
        self._kept: list[_Connection] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._found: list[AddrInfoType] = []
        self._found_at = -inf

    def begin(
        self,
        request: tuple[bytes, bytes],
        receiver: Receiver,
        on_unfinished: Callable[[], None] | None = None,
    ) -> Exchange:
        """Send a request (head and body). `receiver` gets the answer, never before this method returns.

        `on_unfinished`: called once if the exchange ends before the answer is complete.
        Raises: EngineRefused: the pool is closed.
        """
        now = self._now_unless_closed()
        exchange = Exchange(self, request, receiver, on_unfinished, now)
        connection = self._take(now)
        if connection is None:
            exchange.dial()
        else:
            exchange.use(connection, is_kept=True)
        return exchange

    def begin_streamed(self, head: bytes, receiver: Receiver) -> Exchange:
        """Send the head of a request on a new connection; its body follows by `Exchange.write`.

        An idle connection may be closed already, and a body that was read once cannot be sent once more.
        Raises: EngineRefused: the pool is closed.
        """
        exchange = Exchange(self, (head, b""), receiver, None, self._now_unless_closed())
        exchange.has_more = True
        exchange.on_connected = asyncio.get_running_loop().create_future()
        exchange.dial()
        return exchange

    def _now_unless_closed(self) -> float:
        """Raises: EngineRefused: the pool is closed."""
        if self.is_closed:
            raise self.error(EngineRefused, "is no longer watched")
        self._loop = self._loop or asyncio.get_running_loop()
        return self._loop.time()

    def now(self) -> float:
        return asyncio.get_running_loop().time() if self._loop is None else self._loop.time()

    def _take(self, now: float) -> _Connection | None:
        """Return the idle connection that was used last, None if the server may have closed all of them."""
        while self._kept:
            connection = self._kept.pop()
            if not connection.transport.is_closing() and now - connection.idle_since < self._keep_s:
                return connection
            connection.transport.abort()
        return None

    async def dial(self, exchange: Exchange) -> None:
        """Connect for an exchange. A task's root: every failure goes to the exchange."""
        try:
            async with asyncio.timeout(self._connect_s):
                connection = await self._connected()
        except Exception as error:  # noqa: BLE001 (a task's root: whatever is wrong with a name, the exchange must end)
            why, is_silent = self._why(error)
            exchange.refused(why, is_silent=is_silent)
            return
        if self.is_closed:
            connection.transport.abort()
        if connection.transport.is_closing():
            exchange.refused(_why(None), is_silent=False)
        else:
            exchange.use(connection)

    async def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self.now() - self._found_at > _KNOWN_S:
            self._found = await self._look_up()
            self._found_at = self.now()
        name = self._address[0] if self._tls is not None else None
        new = partial(_Connection, self)
        if len(self._found) == 1:  # for which the event loop has a shorter way
            [(family, _, proto, _, address)] = self._found
            to = {"host": address[0], "port": address[1], "family": family, "proto": proto}
            return (await loop.create_connection(new, **to, ssl=self._tls, server_hostname=name))[1]
        sock = await start_connection(self._found, happy_eyeballs_delay=_NEXT_ADDRESS_S, loop=loop)
        try:
            return (await loop.create_connection(new, sock=sock, ssl=self._tls, server_hostname=name))[1]
        except BaseException:
            sock.close()
            raise

    async def _look_up(self) -> list[AddrInfoType]:
        host, port = self._address
        kind = (0, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:  # an IP address needs no thread
            return [*socket.getaddrinfo(host, port, *kind, socket.AI_NUMERICHOST)]
        except socket.gaierror:
            return [*await asyncio.to_thread(socket.getaddrinfo, host, port, *kind)]

    def keep(self, connection: _Connection) -> None:
        """A connection is idle again."""
        connection.idle_since = self.now()
        self._kept.append(connection)
        if self._timer is None:
            self._arm()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._keep_s, self._drop_old)

    def _drop_old(self) -> None:
        """Close the connections that were idle for `keep_s`, oldest first."""
        self._timer = None
        before = self.now() - self._keep_s
        old = [connection for connection in self._kept if connection.idle_since <= before]
        del self._kept[: len(old)]
        for connection in old:
            connection.transport.abort()
        if self._kept:
            self._arm()

    def forget(self, connection: _Connection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        if connection in self._kept:
            self._kept.remove(connection)

    def close(self) -> None:
        """Close every connection; running exchanges fail, at the latest when connected. May be called twice."""
        self.is_closed = True
        self._kept.clear()
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self.connections):
            connection.transport.abort()
