"""uvicorn, serving one application on a socket that already listens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator

import uvicorn

from preble.web.connection import BoundedConnection
from preble.web.connection_limit import ConnectionLimit

_KEEP_ALIVE_S = 75
"""How long an idle connection is kept. Longer than the 60 s of common load balancers and than our own clients: then the
client closes it, and no request meets a closed connection."""
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
    ) -> None:
        """`app`: an ASGI application. `grace_s`: how long running requests may continue at the end.

        `most_connections`: the most open connections; None for no limit. `probes`: paths that are answered beyond it.
        """
        limit = ConnectionLimit(most_connections, probes) if most_connections is not None else None
        super().__init__(
            uvicorn.Config(
                app,
                http=type("Connection", (BoundedConnection,), {"limit": limit}),
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on `sockets`, which are closed at the end."""
        listening = [*(sockets or [])]
        if sys.platform != "win32":
            listening += [sock.dup() for sock in listening for _ in range(_ACCEPTED_AT_ONCE - 1)]
        await super().serve(listening)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()
