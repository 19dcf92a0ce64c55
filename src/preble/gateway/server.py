"""The gateway as a server: puts the parts together, listens, and shuts down without cutting off what runs."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from preble.config import GatewayConfig, ReplicaConfig
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import ReplicaId
from preble.engines import EngineServer, HttpTimeouts, KvEventEndpoints, connect
from preble.gateway.collector import freeze_gc
from preble.gateway.http.app import App
from preble.gateway.requests.inference import Inference
from preble.gateway.requests.intake import Intake
from preble.logs import LogLosses
from preble.serving.dispatcher import Dispatcher
from preble.serving.parity.watch import ParityWatch
from preble.serving.replicas.monitor import ReplicaMonitor
from preble.serving.scheduling import Scheduling, start_scheduling
from preble.serving.telemetry.engine_load import EngineLoadCollector
from preble.serving.telemetry.metrics import Telemetry
from preble.serving.telemetry.scheduler import SchedulerCollector
from preble.serving.tokens.pool import make_token_source
from preble.web.listening import listen, url_of
from preble.web.open_files import open_files_limit, raise_open_files_limit
from preble.web.server import Server

_ABORT_S = 5.0
"""For aborted requests to tell their clients and engines so."""


def run(
    config: GatewayConfig, on_listening: Callable[[str], None] | None = None, *, log_losses: LogLosses | None = None
) -> None:
    """Serve until SIGINT or SIGTERM; a second signal does not wait for running requests. Blocks.

    `on_listening`: called with the gateway's URL; by default that is printed. `log_losses`: shown in the metrics.
    Raises: ConfigError: a setting turns out to be unusable, the port among them.
    """
    tell = on_listening or _print_url
    freeze_gc()
    raise_open_files_limit()
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_serve_until_signal(config, tell, log_losses))


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def _print_url(url: str) -> None:
    sys.stdout.write(f"preble serve: listening on {url}\n")
    sys.stdout.flush()


async def _serve_until_signal(config: GatewayConfig, tell: Callable[[str], None], log_losses: LogLosses | None) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    async with serving(config, log_losses=log_losses) as gateway:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, _on_signal, stop, gateway)
        tell(gateway.url)
        await stop.wait()


def _on_signal(stop: asyncio.Event, gateway: Gateway) -> None:
    if stop.is_set():
        gateway.hurry()
    stop.set()


class Gateway:
    """A running gateway. `url`: where it listens."""

    def __init__(self, url: str, dispatcher: Dispatcher, intake: Intake, server: Server) -> None:
        self.url = url
        self.dispatcher = dispatcher
        self.intake = intake
        self._server = server

    def hurry(self) -> None:
        """Wait no longer for running requests in a shutdown that has begun."""
        self._server.force_exit = True


@asynccontextmanager
async def serving(
    config: GatewayConfig, scheduler: GlobalScheduler | None = None, *, log_losses: LogLosses | None = None
) -> AsyncIterator[Gateway]:
    """A gateway that accepts requests within the context. Leaving it stops accepting, waits for running requests for
    `timeouts.shutdown_s`, then aborts them.

    `scheduler`: made as configured unless given; one that is given is not logged. `log_losses`: shown in the metrics.
    Raises: ConfigError: a setting turns out to be unusable, the port among them.
    """
    servers = [_server(config, replica) for replica in config.replicas]
    scheduling = start_scheduling(config, scheduler)
    try:
        async with _serving(config, scheduling, servers, log_losses) as gateway:
            yield gateway
    finally:
        await scheduling.close()


@asynccontextmanager
async def _serving(
    config: GatewayConfig, scheduling: Scheduling, servers: list[EngineServer], log_losses: LogLosses | None
) -> AsyncIterator[Gateway]:
    telemetry = Telemetry(log_losses)
    telemetry.registry.register(SchedulerCollector(scheduling.scheduler, scheduling.log))
    dispatcher = Dispatcher(scheduling.scheduler, telemetry, scheduling.recent)
    telemetry.registry.register(EngineLoadCollector(dispatcher.live))
    tokens = await asyncio.to_thread(make_token_source, config, dispatcher.engines_for, dispatcher.suspect)
    try:
        intake = Intake(
            dispatcher, tokens, telemetry, config.limits, forward_authorization=config.auth.forward_authorization
        )
        parity = ParityWatch(dispatcher, tokens if config.tokenizer is not None else None, telemetry, config.parity)
        app = App(config, dispatcher, Inference(intake, total_s=config.timeouts.total_s), telemetry, parity)
        monitors = [ReplicaMonitor(server, dispatcher, config.health, parity) for server in servers]
        with listen(config.host, config.port) as sock:
            async with _running(monitors), _accepting(app, sock, config) as server:
                gateway = Gateway(url_of(config.host, sock.getsockname()[1]), dispatcher, intake, server)
                telemetry.log.info("listening", url=gateway.url, policy=config.policy, replicas=len(servers))
                yield gateway
    finally:
        tokens.close()
        dispatcher.close()


def _server(config: GatewayConfig, replica: ReplicaConfig) -> EngineServer:
    endpoints = None
    if replica.kv_events is not None:
        endpoints = KvEventEndpoints(replica.kv_events, replica.kv_events_replay, replica.kv_events_topic)
    timeouts = HttpTimeouts(
        connect_s=config.timeouts.connect_s,
        first_byte_s=config.timeouts.first_byte_s,
        idle_s=config.timeouts.idle_s,
        control_s=config.health.check_timeout_s,
    )
    return connect(
        replica.url,
        replica.engine or config.engine,
        replica_id=ReplicaId(replica.url),
        api_key=config.auth.engine_api_key,
        timeouts=timeouts,
        kv_events=endpoints,
    )


@asynccontextmanager
async def _running(monitors: list[ReplicaMonitor]) -> AsyncIterator[None]:
    """Every replica is watched by its monitor within the context."""
    # No task group: it would wrap the errors of the caller's code in groups, and a monitor lets no error out.
    tasks = [asyncio.create_task(monitor.run()) for monitor in monitors]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _accepting(app: App, sock: socket.socket, config: GatewayConfig) -> AsyncIterator[Server]:
    """Connections are accepted within the context; leaving it is the graceful shutdown."""
    # Half for clients, so that however many come, replicas can still be reached.
    most_connections = open_files_limit() // 2
    server = Server(app, grace_s=math.ceil(config.timeouts.shutdown_s), most_connections=most_connections)
    serve = asyncio.create_task(server.serve(sockets=[sock]))
    serve.add_done_callback(lambda _: server.listening.set())
    await server.listening.wait()
    try:
        yield server
    finally:
        server.should_exit = True
        await serve
        await _abort_rest(server)


async def _abort_rest(server: Server) -> None:
    """End what still runs after the graceful part."""
    tasks = set(server.server_state.tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        structlog.get_logger().warning("requests_aborted", count=len(tasks))
        await asyncio.wait(tasks, timeout=_ABORT_S)
