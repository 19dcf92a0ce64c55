"""The server: it listens on sockets, keeps its connections within their time limits, and ends in peace."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Collection, Sequence
from email.utils import formatdate
from math import inf

from preble.web.server.answering import Accept
from preble.web.server.connection import ClientConnection, Shared
from preble.web.server.connection_limit import ConnectionLimit
from preble.web.server.listening import BACKLOG

_SWEEP_S = 0.2
"""Between two looks at what is late, on all connections: one timer, not several a request; none without connections."""
_ACCEPTED_AT_ONCE = 16
"""The most connections that one turn of the event loop accepts. uvloop accepts one for each listening file, however
many wait. With one file, a new connection to a busy server, such as a probe, would wait for many turns."""
_LOOK_S = 0.05
"""Between two looks whether everything has ended, when the server stops."""


class Server:
    """Serves from `serve` until `stop`. `listening` is set once connections are accepted."""

    def __init__(
        self, accept: Accept, *, grace_s: float, most_connections: int | None = None, probes: Collection[bytes] = ()
    ) -> None:
        """`accept`: returns what answers a request. `grace_s`: how long running requests may continue at the end.

        `most_connections`: the most open connections; None for no limit. `probes`: paths that are answered beyond it.
        """
        limit = ConnectionLimit(most_connections, probes) if most_connections is not None else None
        self._shared = Shared(accept, limit, self._sweep_on)
        self._grace_s = grace_s
        self._stopping = asyncio.Event()
        self._ends_at = inf
        self.listening = asyncio.Event()
        self.servers: list[asyncio.Server] = []
        self._sweeping: asyncio.TimerHandle | None = None
        self._dated_at = 0

    @property
    def connections(self) -> set[ClientConnection]:
        """The open connections."""
        return self._shared.connections

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """Tasks of requests that are being answered."""
        return self._shared.tasks

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Serve on `sockets`, which are closed at the end, until `stop`; then wait for running requests, but not longer
        than the grace, after which their tasks are cancelled."""
        files = [*sockets]
        if sys.platform != "win32":
            files += [sock.dup() for sock in sockets for _ in range(_ACCEPTED_AT_ONCE - 1)]
        try:
            for sock in files:
                await self._listen(sock)
            self.listening.set()
            await self._stopping.wait()
            self._refuse_others(files)
            await self._end()
        finally:
            self._refuse_others(files)
            if self._sweeping is not None:
                self._sweeping.cancel()

    async def _listen(self, sock: socket.socket) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: ClientConnection(self._shared, loop), sock=sock, backlog=BACKLOG)
        self.servers.append(server)
        return server

    def leave(self, grace_s: float) -> None:
        """Accept no more, since another process does; at the end running requests may continue for `grace_s`."""
        self._grace_s = grace_s
        self._shared.leaves_idle = True
        for one in self.servers:
            one.close()

    async def accept_at(self, sock: socket.socket) -> asyncio.Server:
        """Accept on a further socket too, until the result is closed. `sock`: stays the caller's."""
        return await self._listen(sock.dup())

    def stop(self) -> None:
        """End the server."""
        self._stopping.set()

    def hurry(self, within_s: float = 0.0) -> None:
        """Wait for running requests for `within_s` from now, at most."""
        self._ends_at = min(self._ends_at, asyncio.get_running_loop().time() + within_s)

    def _refuse_others(self, files: Sequence[socket.socket]) -> None:
        for server in self.servers:
            server.close()
        for sock in files:
            sock.close()

    def _is_over(self) -> bool:
        return asyncio.get_running_loop().time() >= self._ends_at or not (self.connections or self.tasks)

    async def _end(self) -> None:
        self._shared.is_ending = True
        for connection in list(self.connections):
            connection.shutdown()
        self.hurry(self._grace_s)
        await asyncio.sleep(_LOOK_S)  # for connections that are accepted and have not opened yet
        while not self._is_over():  # noqa: ASYNC110 (the sets have no event)
            await asyncio.sleep(_LOOK_S)
        for task in self.tasks:
            task.cancel()

    def _sweep_on(self) -> None:
        """A connection has opened: look at what is late as long as there are connections."""
        if self._sweeping is None:
            self._renew_date()
            self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)

    def _renew_date(self) -> None:
        """Renew the date in the heads of answers."""
        if (now := int(time.time())) != self._dated_at:  # a clock may be set back
            self._dated_at = now
            self._shared.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]

    def _sweep(self) -> None:
        if not (connections := self._shared.connections):
            self._sweeping = None
            return
        self._renew_date()
        loop = asyncio.get_running_loop()
        self._sweeping = loop.call_later(_SWEEP_S, self._sweep)  # first: no connection's failure ends the time limits
        now = loop.time()
        for connection in list(connections):
            connection.on_time(now)

    def stop_rest(self) -> int:
        """Answer at once what can be answered of what is still being served. Return how many requests were being
        served."""
        return sum(connection.stop() for connection in list(self.connections))
