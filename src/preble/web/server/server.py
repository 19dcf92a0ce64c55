"""uvicorn, serving one application on a socket that already listens."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from email.utils import formatdate

import uvicorn

from preble.web.server.answering import Accept
from preble.web.server.connection import BoundedConnection
from preble.web.server.connection_limit import ConnectionLimit

_KEEP_ALIVE_S = 75
"""How long an idle connection is kept. Longer than the 60 s of common load balancers and than our own clients: then the
client closes it, and no request meets a closed connection."""
_SWEEP_S = 0.2
"""Between two looks at what is late, on all connections: one timer, not several a request; none without connections."""
_ACCEPTED_AT_ONCE = 16
"""The most connections that one turn of the event loop accepts. uvloop accepts one for each listening file, however
many wait. With one file, a new connection to a busy server, such as a probe, would wait for many turns."""


class Server(uvicorn.Server):
    """Serves until `should_exit`. The caller handles signals; `listening` is set once connections are accepted."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        *,
        grace_s: int,
        most_connections: int | None = None,
        probes: Collection[bytes] = (),
        accept: Accept | None = None,
    ) -> None:
        """`app`: an ASGI application. `grace_s`: how long running requests may continue at the end. `accept`: takes
        POSTs that are served by callbacks instead.

        `most_connections`: the most open connections; None for no limit. `probes`: paths that are answered beyond it.
        """
        limit = ConnectionLimit(most_connections, probes) if most_connections is not None else None
        settings: dict[str, object] = {"limit": limit, "opened": staticmethod(self._sweep_on)}
        settings["accept"] = accept and staticmethod(accept)
        self._exiting = asyncio.Event()
        self._connection_class: type[BoundedConnection] = type("Connection", (BoundedConnection,), settings)
        super().__init__(
            uvicorn.Config(
                app,
                http=self._connection_class,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=grace_s,
            )
        )
        self.listening = asyncio.Event()
        self._sweeping: asyncio.TimerHandle | None = None
        self._dated_at = 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on `sockets`, which are closed at the end."""
        listening = [*(sockets or [])]
        if sys.platform != "win32":
            listening += [sock.dup() for sock in listening for _ in range(_ACCEPTED_AT_ONCE - 1)]
        try:
            await super().serve(listening)
        finally:
            if self._sweeping is not None:
                self._sweeping.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @property
    def should_exit(self) -> bool:
        """Set it to end the server."""
        return self._exiting.is_set()

    @should_exit.setter
    def should_exit(self, exits: bool) -> None:
        if exits:
            self._exiting.set()

    async def main_loop(self) -> None:
        """In place of uvicorn's, which wakes up ten times a second."""
        await self._exiting.wait()

    def leave(self, grace_s: float) -> None:
        """Accept no more, since another process does; at the end running requests may continue for `grace_s`."""
        self.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._connection_class.leaves_idle = True  # also of those that are open
        for one in self.servers:
            one.close()

    async def accept_at(self, sock: socket.socket) -> asyncio.Server:
        """Accept on a further socket too, until the result is closed. `sock`: stays the caller's."""
        further = await asyncio.get_running_loop().create_server(self._connection, sock=sock.dup())
        self.servers.append(further)
        return further

    def _connection(self) -> asyncio.Protocol:
        state, app_state = self.server_state, self.lifespan.state
        return self.config.http_protocol_class(config=self.config, server_state=state, app_state=app_state)  # type: ignore[call-arg]

    def _sweep_on(self) -> None:
        """A connection has opened: look at what is late as long as there are connections."""
        if self._sweeping is None:
            self._renew_date()
            self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)

    def _renew_date(self) -> None:
        """Renew the date in the heads of answers."""
        if (now := int(time.time())) != self._dated_at:  # a clock may be set back
            self._dated_at = now
            date = formatdate(self._dated_at, usegmt=True).encode()
            self.server_state.default_headers = [(b"date", date), *self.config.encoded_headers]

    def _sweep(self) -> None:
        if not self.server_state.connections:
            self._sweeping = None
            return
        self._renew_date()
        loop = asyncio.get_running_loop()
        self._sweeping = loop.call_later(_SWEEP_S, self._sweep)  # first: no connection's failure ends the time limits
        now = loop.time()
        for connection in list(self.server_state.connections):
            if isinstance(connection, BoundedConnection):
                connection.on_time(now)

    def stop_rest(self) -> int:
        """Answer at once what is still being served by callbacks. Return how many requests were being served."""
        connections = [one for one in self.server_state.connections if isinstance(one, BoundedConnection)]
        return sum(connection.stop() for connection in connections)
