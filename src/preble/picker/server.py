"""The picker as a server: gateways' streams, the health that they and Kubernetes ask for, a graceful end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from preble.config import GatewayConfig
from preble.config.picker import PickerConfig
from preble.errors import BodyTooSlow, ConfigError
from preble.gateway.server import Gateway
from preble.picker import messages
from preble.picker.endpoints import require_address
from preble.picker.exchange import Exchange
from preble.picker.leadership import Leadership
from preble.web.listening import url_of

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
ALIVE = ("", "liveness")
READY = ("readiness", SERVICE)
"""Names that the health service knows: those that say SERVING always, and those that do while gateways may ask."""
_LOOK_S = 0.2
_MOST_MESSAGE_BYTES = 16 * 1024 * 1024
_WRONG_MODE = "set request_body_mode and response_body_mode of the gateway's ext_proc filter to FULL_DUPLEX_STREAMED"


class Picker:
    """A picker that runs. `port`: where gateways ask it."""

    def __init__(self, gateway: Gateway, leadership: Leadership | None) -> None:
        self.port = 0
        self._gateway = gateway
        self._leadership = leadership
        self._has_been_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether gateways are to ask here. A picker that has seen a replica stays ready without one: it says 503."""
        self._has_been_ready = self._has_been_ready or self._gateway.serving.waits_for is None
        leads = self._leadership is None or self._leadership.is_leader
        return leads and self._has_been_ready and not self._gateway.is_draining

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the service, on encoded messages."""
        process = grpc.stream_stream_rpc_method_handler(self._process)
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})

    async def _process(self, _: object, context: Any) -> None:
        """Serve one stream: one request and its answer."""
        body_s = self._gateway.config.timeouts.body_s
        timeout = asyncio.timeout(body_s)
        async with Exchange(self._gateway, lambda: timeout.reschedule(None)) as exchange:
            try:
                async with timeout:
                    await self._exchange(exchange, context)
            except TimeoutError:
                await context.write(exchange.timed_out(BodyTooSlow(f"the body did not arrive within {body_s:g} s")))

    async def _exchange(self, exchange: Exchange, context: Any) -> None:
        while not exchange.has_ended and (raw := await context.read()) is not grpc.aio.EOF:
            message = messages.decode(raw)
            if not messages.is_full_duplex(message):
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _WRONG_MODE)
            for reply in await exchange.replies(message):
                await context.write(reply)


@asynccontextmanager
async def picking(gateway: Gateway) -> AsyncIterator[Picker]:
    """A picker that answers within the context, beside the gateway's own pages.

    Leaving it waits for running requests for `timeouts.shutdown_s`, then aborts them.
    Raises: ConfigError: a setting is unusable, for example the port.
    """
    config = gateway.config
    for replica in config.replicas:
        require_address(replica.url)
    leadership = Leadership(config) if config.picker.lease is not None else None
    picker = Picker(gateway, leadership)
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", _MOST_MESSAGE_BYTES), ("grpc.so_reuseport", 0)]
    )
    server.add_generic_rpc_handlers((picker.handlers(),))
    states = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    picker.port = _bind(server, config)
    await server.start()
    structlog.get_logger().info("picking", url=url_of(config.host, picker.port), lease=config.picker.lease)
    tasks = [asyncio.create_task(_tell_health(states, picker))]
    if leadership is not None:
        tasks.append(asyncio.create_task(leadership.run()))
    try:
        yield picker
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await states.enter_graceful_shutdown()
        await server.stop(config.timeouts.shutdown_s)


async def _tell_health(states: Any, picker: Picker) -> None:
    """Keep what the health service says current."""
    for name in ALIVE:
        await states.set(name, HealthCheckResponse.SERVING)
    said: bool | None = None
    while True:
        if picker.is_ready != said:
            said = picker.is_ready
            for name in READY:
                await states.set(name, HealthCheckResponse.SERVING if said else HealthCheckResponse.NOT_SERVING)
        await asyncio.sleep(_LOOK_S)


def _bind(server: Any, config: GatewayConfig) -> int:
    """Raises: ConfigError: the port is taken, or a certificate cannot be read."""
    address = url_of(config.host, config.picker.port).partition("//")[2]
    try:
        credentials = _credentials(config.picker)
        bound: int = (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise ConfigError(f"the picker cannot listen on {address}; choose another port (picker.port)") from error
    return bound


def _credentials(config: PickerConfig) -> grpc.ServerCredentials | None:
    """Raises: ConfigError: a file is missing or cannot be read."""
    if config.tls_cert is None and config.tls_key is None:
        return None
    if config.tls_cert is None or config.tls_key is None:
        raise ConfigError("picker.tls_cert and picker.tls_key belong together; give both")
    try:
        key, chain = (Path(file).expanduser().read_bytes() for file in (config.tls_key, config.tls_cert))
    except OSError as error:
        raise ConfigError(f"picker.tls_cert and picker.tls_key: {error}") from error
    return grpc.ssl_server_credentials([(key, chain)])
