"""TLS of the picker's connections: its settings, and how many handshakes may be under way at the same time.

The loops' own servers tell nobody of a connection before its handshake is over, so connections are accepted here.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from socket import socket

import structlog

from preble.config.picker import PickerConfig
from preble.errors import ConfigError

MOST_HANDSHAKES = 128
"""Beyond them the one that has lasted for longest makes room."""
HANDSHAKE_S = 10.0
"""The most time that one may take."""
_ACCEPTED_AT_ONCE = 16
_ACCEPT_AGAIN_S = 1.0
"""So long no connection is accepted where the system has no files left."""


class Handshakes:
    """Accepts connections at a listening socket, from `begin` until `end`.

    `serve`: returns the protocol of a connection that is secured. `refused`: called for each that has to make room.
    """

    def __init__(
        self,
        listener: socket,
        context: ssl.SSLContext,
        serve: Callable[[], asyncio.Protocol],
        refused: Callable[[], None],
    ) -> None:
        self._listener = listener
        self._context = context
        self._serve = serve
        self._refused = refused
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        self._running: dict[asyncio.Task[None], None] = {}
        """The oldest first."""

    def begin(self) -> None:
        """Accept connections."""
        self._again = None
        self._loop.add_reader(self._listener, self._accept)

    def end(self) -> None:
        """Accept no more, and end what is not secured yet."""
        self._loop.remove_reader(self._listener)
        if self._again is not None:
            self._again.cancel()
        self._listener.close()
        for task in self._running:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                structlog.get_logger().warning("accept_failed", error=str(error), again_in_s=_ACCEPT_AGAIN_S)
                self._loop.remove_reader(self._listener)
                self._again = self._loop.call_later(_ACCEPT_AGAIN_S, self.begin)
                return
            accepted.setblocking(False)
            self._enter(accepted)

    def _enter(self, accepted: socket) -> None:
        if len(self._running) >= MOST_HANDSHAKES:
            oldest = next(iter(self._running))
            del self._running[oldest]
            oldest.cancel()
            self._refused()
        task = self._loop.create_task(self._secure(accepted))
        self._running[task] = None
        task.add_done_callback(partial(self._over, accepted))

    def _over(self, accepted: socket, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        if task.cancelled():  # perhaps before its first step
            accepted.close()

    async def _secure(self, accepted: socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._serve, accepted, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError:  # an SSLError is one, and so are time-outs
            accepted.close()


def tls_settings(config: PickerConfig) -> ssl.SSLContext | None:
    """Return how connections are secured, None if they are not.

    Raises: ConfigError: a file is missing or cannot be used.
    """
    if config.tls_cert is None and config.tls_key is None:
        return None
    if config.tls_cert is None or config.tls_key is None:
        raise ConfigError("picker.tls_cert and picker.tls_key belong together; give both")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(Path(config.tls_cert).expanduser(), Path(config.tls_key).expanduser())
    except OSError as error:  # an SSLError is one
        raise ConfigError(f"picker.tls_cert and picker.tls_key cannot be used: {error}") from error
    context.set_alpn_protocols(["h2"])
    return context
