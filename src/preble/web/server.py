"""uvicorn, serving one application on a socket that already listens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator

import uvicorn

from preble.web.connection import BoundedConnection
from preble.web.connection_limit import ConnectionLimit

_KEEP_ALIVE_S = 75
"""How long an idle connection is kept. Longer than the 60 s of common load balancers and than our own clients: then the
client closes it, and no request meets a closed connection."""


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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()
