"""Packets between gateways over NATS core: one subject for each cluster."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import structlog

from preble import background
from preble.config import PeersConfig
from preble.errors import ConfigError
from preble.peers.packets import MAX_PACKET_BYTES, VERSION

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

_RETRY_S = 1
_CLOSE_S = 5.0
_MOST_ERRORS = 8
"""The most errors that are logged between two connections."""
_PING_S = 2
"""A connection is lost after two pings without an answer, when the third is due."""


class NatsBus:
    """See `Bus` and `NewBus`."""

    def __init__(
        self, config: PeersConfig, name: str, on_packet: Callable[[bytes], None], on_change: Callable[[bool], None]
    ) -> None:
        """Raises: ConfigError: a setting is unusable, or the library is not installed."""
        self._subject = f"preble.{VERSION}.{_cluster(config)}.gateways"
        self._options = _options(config) | {"name": f"preble {name}"}
        self._on_packet = on_packet
        self._on_change = on_change
        self._client: Client = _new_client()
        self._was_connected: bool | None = None
        self._errors: set[str] = set()
        """What was logged since the last connection: a server that refuses us does so every second."""
        self._connecting = asyncio.create_task(self._connect())

    @property
    def is_connected(self) -> bool:
        """Whether packets get through now."""
        return self._client.is_connected

    async def publish(self, packet: bytes) -> None:
        """Send to all others. Drops the packet if there is no connection, or if it is larger than NATS takes."""
        import nats.errors

        if not self._client.is_connected:
            return
        if len(packet) > min(self._client.max_payload, MAX_PACKET_BYTES):
            structlog.get_logger().warning("peers_packet_too_large", bytes=len(packet))
            return
        try:
            await self._client.publish(self._subject, packet)
        except (nats.errors.Error, OSError):
            self._tell_change()

    async def close(self) -> None:
        """Send what is left, and stop. From then on a lost connection is not reported."""
        self._on_change = lambda is_connected: None
        await background.end(self._connecting)
        with contextlib.suppress(TimeoutError):
            async with background.time_limit(_CLOSE_S):
                if self._client.is_connected:
                    await self._client.drain()
                elif not self._client.is_closed:
                    await self._client.close()

    async def _connect(self) -> None:
        """Connect for the first time. Afterwards the client reconnects by itself."""
        while True:
            try:
                await self._client.connect(
                    **self._options,
                    no_echo=True,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RETRY_S,
                    connect_timeout=2,
                    ping_interval=_PING_S,
                    disconnected_cb=self._changed,
                    reconnected_cb=self._changed,
                    closed_cb=self._changed,
                    error_cb=self._failed,
                )
                await self._client.subscribe(self._subject, cb=self._received)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 (whatever it is: the gateway serves alone until NATS is there)
                await self._failed(error)
                await asyncio.sleep(_RETRY_S)
                self._client = _new_client()
                continue
            self._tell_change()
            return

    async def _received(self, message: Msg) -> None:
        self._on_packet(message.data)

    async def _changed(self) -> None:
        self._tell_change()

    async def _failed(self, error: Exception) -> None:
        reason = (str(error) or type(error).__name__)[:200]
        if reason not in self._errors and len(self._errors) < _MOST_ERRORS:
            self._errors.add(reason)
            structlog.get_logger().warning("peers_bus_error", error=reason)
        self._tell_change()

    def _tell_change(self) -> None:
        if self._client.is_connected != self._was_connected:
            self._was_connected = self._client.is_connected
            if self._was_connected:
                self._errors.clear()
            self._on_change(self._was_connected)


def check_settings(config: PeersConfig) -> None:
    """Connect to nothing. Raises: ConfigError: a setting is unusable, or the library is not installed."""
    _cluster(config)
    _options(config)
    _new_client()


def _new_client() -> Client:
    """Raises: ConfigError: the library is not installed."""
    try:
        from nats.aio.client import Client
    except ImportError as error:
        raise ConfigError("peers need the library nats-py: pip install 'preble[ha]'") from error
    return Client()


def _cluster(config: PeersConfig) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", config.cluster):
        raise ConfigError(f"peers.cluster {config.cluster!r} must be up to 64 letters, digits, '-' and '_'")
    return config.cluster


def _options(config: PeersConfig) -> dict[str, Any]:
    """Return arguments of the client's `connect`. Raises: ConfigError."""
    for server in config.servers:
        if urlsplit(server).scheme not in ("nats", "tls") or not urlsplit(server).hostname:
            raise ConfigError(
                f"peers.servers: {server!r} is not a NATS URL; give one such as nats://user:password@host:4222"
            )
    options: dict[str, Any] = {"servers": list(config.servers)}
    if config.credentials is not None:
        options["user_credentials"] = config.credentials
    if config.tls_ca or config.tls_cert or any(server.startswith("tls:") for server in config.servers):
        options["tls"] = _tls(config)
    return options


def _tls(config: PeersConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
        if config.tls_cert is not None:
            context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot read peers.tls_ca, tls_cert or tls_key: {error}") from error
    return context
