"""uvicorn, set up for serving one application on a socket that listens already."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn

from preble.web.connection import BoundedConnection, ConnectionLimit

_KEEP_ALIVE_S = 75
"""How long an idle connection is kept: above the 60 s for which common load balancers keep theirs, and longer than
our own clients do, so that it is they who close it and no request meets a closed one."""


class Server(uvicorn.Server):
    """Serves until `should_exit`. Leaves signals to the caller; `listening` is set once connections are accepted."""

    def __init__(
        self, app: Callable[..., Awaitable[None]], *, grace_s: int, most_connections: int | None = None
    ) -> None:
        """`app`: an ASGI application. `grace_s`: how long requests that run at the end may go on.

        `most_connections`: at once; no bound of our own if None.
        """
        limit = ConnectionLimit(most_connections) if most_connections is not None else None
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
