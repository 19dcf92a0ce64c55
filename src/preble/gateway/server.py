"""The gateway as a server: starts its parts, listens, and lets running requests end when it shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import structlog

from preble import background
from preble.config import GatewayConfig
from preble.config.load import ConfigSources
from preble.config.reloading import in_force
from preble.core.placing.scheduler import GlobalScheduler
from preble.errors import ConfigError
from preble.gateway import signals
from preble.gateway.app import App
from preble.gateway.handover import Inherited, Upgrade
from preble.gateway.http.access import KeyRing
from preble.gateway.http.bodies import BodyMemoryBudget, BodyShare
from preble.gateway.http.page_client import PageClient
from preble.gateway.pages.table import PROBES, Pages
from preble.gateway.reloading import contents, reload_on_change, reload_whenever, tell_of_reload
from preble.logs import LogLosses
from preble.profiles import load_profile
from preble.prompts.tokens.tokenizer import local_model_files
from preble.serving import Serving, check_settings
from preble.web.server.listening import is_open_to_network, listen, url_of
from preble.web.server.memory import freeze_gc, return_large_memory
from preble.web.server.open_files import open_files_limit, raise_open_files_limit
from preble.web.server.server import Server

_ABORT_S = 5.0
"""Time for aborted requests to end their answers and their work in the engines."""


def run(
    config: GatewayConfig,
    on_listening: Callable[[str], None] | None = None,
    *,
    sources: ConfigSources | None = None,
    log_losses: LogLosses | None = None,
    beside: Beside | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; a second one does not wait for running requests. SIGHUP reloads. Blocks.

    SIGTERM first drains for `timeouts.drain_s`. Listens on the socket that systemd passed, if it did.

    `on_listening`: called with the gateway's URL; by default that is printed. `sources`: what is reloaded; without it
    only the keys are. `log_losses`: shown in the metrics. `beside`: a further server, for as long.
    Raises: ConfigError: a setting is unusable, for example the port.
    """
    tell = on_listening or print_url
    with prepared_process() as runner:
        runner.run(_serve_until_signal(config, tell, sources, log_losses, beside))


def check(config: GatewayConfig) -> None:
    """Read the keys, the profile, a tokenizer in a folder and the settings, as a start does.

    Raises: ConfigError: one of them is unusable.
    """
    KeyRing(config.auth, config.queue.classes)
    if config.profile is not None:
        load_profile(config.profile)
    if config.tokenizer is not None:
        local_model_files(config.tokenizer)
    check_settings(config)


def prepared_process() -> asyncio.Runner:
    """Prepare this process for serving; return the runner of its event loop."""
    freeze_gc()
    return_large_memory()
    raise_open_files_limit()
    return asyncio.Runner(loop_factory=_new_loop)


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def print_url(url: str) -> None:
    sys.stdout.write(f"preble serve: listening on {url}\n")
    sys.stdout.flush()


async def _serve_until_signal(
    config: GatewayConfig,
    tell: Callable[[str], None],
    sources: ConfigSources | None,
    log_losses: LogLosses | None,
    beside: Beside | None,
) -> None:
    told = _Told()
    signals.act_on(told.stop, told.reload, told.upgrade if beside is None else None)
    origin = Inherited(os.environ)
    started = serving(config, sources=sources, log_losses=log_losses, given=origin.listeners)
    try:
        async with started as gateway, (beside or _nothing)(gateway):
            told.serves(gateway)
            tell(gateway.url)
            origin.serves()
            await told.stopped.wait()
            await told.upgrading.ended()
    except asyncio.CancelledError:
        if not told.ends_start:
            raise
        structlog.get_logger().info("stopped_at_start")


@asynccontextmanager
async def _nothing(gateway: Gateway) -> AsyncIterator[None]:
    yield


class _Told:
    """What signals tell this process: before it serves, a stop ends the start, and a reload is remembered."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()
        self.ends_start = False
        self._is_stopping = False
        self._reloads = False
        self._gateway: Gateway | None = None
        self._main = asyncio.current_task()
        self.upgrading = Upgrade(self._leave)

    def serves(self, gateway: Gateway) -> None:
        self._gateway = gateway
        if self._reloads:
            gateway.reload_soon()

    def reload(self) -> None:
        if self._gateway is not None:
            self._gateway.reload_soon()
        self._reloads = True

    def stop(self, drains: bool) -> None:
        if self._gateway is None:
            self.ends_start = True
            assert self._main is not None
            self._main.cancel()  # what was accepted meanwhile is answered while the contexts end
            return
        self.upgrading.cancel()
        timeouts, is_second, self._is_stopping = self._gateway.config.timeouts, self._is_stopping, True
        drain_s = timeouts.drain_s if drains and not self._gateway.is_draining else 0.0
        if self._gateway.is_draining:  # told to stop twice, or once after a handover
            self._gateway.hurry(0.0 if is_second else timeouts.shutdown_s)
        self._gateway.drain()
        asyncio.get_running_loop().call_later(drain_s, self.stopped.set)

    def upgrade(self) -> None:
        if self._gateway is not None and not self._gateway.is_draining:
            self.upgrading.begin(self._gateway.listeners, self._gateway.config)

    def _leave(self) -> None:
        assert self._gateway is not None
        self._gateway.leave()
        asyncio.get_running_loop().call_later(self._gateway.config.timeouts.drain_s, self.stopped.set)


class Gateway:
    """A running gateway. `url`: where it listens. `config`: as it was last read. `listeners`: it accepts there."""

    def __init__(
        self,
        url: str,
        config: GatewayConfig,
        sources: ConfigSources | None,
        serving: Serving,
        app: App,
        server: Server,
        listeners: Sequence[socket.socket],
    ) -> None:
        self.url = url
        self.listeners = listeners
        self.config = config
        self.serving = serving
        self._sources = sources
        self._app = app
        self._server = server
        self._reload_wanted = asyncio.Event()

    def reload_soon(self) -> None:
        """Have `reloads` reload; what is wanted several times within a moment is done once."""
        self._reload_wanted.set()

    async def reloads(self) -> None:
        """Reload whenever that is wanted. Never returns."""

        async def reload() -> None:
            self.reload()

        await reload_whenever(self._reload_wanted, reload)

    def reload(self) -> None:
        """Read the configuration and the keys again. If one is unusable, nothing changes, and the log says why.

        A warning names changed settings that count only after a restart.
        """
        log = structlog.get_logger()
        old = self.config
        try:
            read = old if self._sources is None else self._sources.load()
            config = in_force(old, read)
            keys = KeyRing(config.auth, config.queue.classes)
            self._app.reconfigure(config, keys)
        except ConfigError as error:
            log.error("reload_failed", error=str(error), consequence="everything stays as it was")
            return
        self.config = config
        tell_of_reload(old, read, keys.num_keys)

    @property
    def keys(self) -> KeyRing:
        """The keys with which clients may send requests."""
        return self._app.keys

    @property
    def bodies(self) -> BodyMemoryBudget:
        """The memory for requests' bodies, for all that this process serves."""
        return self._app.bodies

    @property
    def pages(self) -> Pages:
        """What is answered besides requests that go to replicas."""
        return self._app.pages

    async def read_body(self, client: PageClient, share: BodyShare) -> bytes:
        """Return the body sent to a page. `share`: of `bodies`; grows by it, for the caller to give back.

        Raises: BodyTooLarge, BodyTooSlow, Overloaded, ClientGone.
        """
        return await client.read_body(self.config.limits.max_body_bytes, self.config.timeouts.body_s, share)

    @property
    def is_draining(self) -> bool:
        """Whether the gateway is about to stop."""
        return self._app.is_draining

    def drain(self) -> None:
        """Keep serving, but say "not ready" and close connections after their answers, so that clients go elsewhere."""
        if not self._app.is_draining:
            structlog.get_logger().info("draining")
        self._app.drain()

    def leave(self) -> None:
        """Accept no more, and drain: the successor serves. What runs may end, however long that takes."""
        self._app.drain(leaves=True)
        self._server.leave(self.config.timeouts.total_s)

    def hurry(self, within_s: float = 0.0) -> None:
        """Abort the requests that still run after `within_s`, during a shutdown."""
        self._server.hurry(within_s)


def tell_of_listening(sock: socket.socket, config: GatewayConfig, *, has_keys: bool) -> str:
    """Log where the gateway listens; return the URL."""
    url = url_of(config.host, sock.getsockname()[1])
    structlog.get_logger().info("listening", url=url, policy=config.policy, replicas=len(config.replicas))
    if is_open_to_network(sock) and not has_keys:
        structlog.get_logger().warning(
            "open_to_everyone",
            consequence="whoever reaches this address may ask, and see in /debug what others ask",
            hint="set auth.api_keys or auth.keys_file",
        )
    return url


Beside = Callable[[Gateway], AbstractAsyncContextManager[object]]
"""A further server in front of the same gateway, such as the picker's."""


@asynccontextmanager
async def serving(
    config: GatewayConfig,
    scheduler: GlobalScheduler | None = None,
    *,
    sources: ConfigSources | None = None,
    log_losses: LogLosses | None = None,
    given: Sequence[socket.socket] = (),
) -> AsyncIterator[Gateway]:
    """Serve a gateway within the context. Leaving it stops accepting, waits for running requests for
    `timeouts.shutdown_s`, then aborts them.

    `scheduler`: made as configured unless given; one that is given is not logged. `sources`: where `config` comes from;
    its file is watched. `log_losses`: shown in the metrics. `given`: sockets to listen on, which are closed at the end.
    Raises: ConfigError: a setting is unusable, for example the port.
    """
    known = await contents(config, sources)  # before the start, which may take minutes
    started = await Serving.start(config, scheduler, log_losses=log_losses)
    try:
        app = App(config, started, KeyRing(config.auth, config.queue.classes))
        if config.scheduler_socket is not None:
            await started.listen(Path(config.scheduler_socket), app.answer_passed_on)
        if given:
            await until_settled(started, config.health.check_timeout_s)
        with contextlib.ExitStack() as stack:
            listeners = [stack.enter_context(one) for one in given or [listen(config.host, config.port)]]
            async with accepting(app, [one.dup() for one in listeners], config) as server:
                url = tell_of_listening(listeners[0], config, has_keys=app.keys.has_keys)
                gateway = Gateway(url, config, sources, started, app, server, listeners)
                follow = partial(reload_on_change, lambda: gateway.config, sources, known, gateway.reload_soon)
                following = background.keep(follow, "configuration watch")
                reloading = background.keep(gateway.reloads, "reloads")
                try:
                    yield gateway
                finally:
                    following.cancel()
                    reloading.cancel()
                    stack.close()  # whoever connects while the last requests run is refused, and need not wait for us
    finally:
        await started.close()


async def until_settled(started: Serving, at_most_s: float) -> None:
    """Wait for the replicas and what they cache: another gateway may still serve, and this one shall do as well."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(at_most_s):
            while not started.is_settled:  # noqa: ASYNC110 (no event says that a replica has come up)
                await asyncio.sleep(0.02)


@asynccontextmanager
async def accepting(app: App, listeners: list[socket.socket], config: GatewayConfig) -> AsyncIterator[Server]:
    """Accept connections within the context; leaving it is the graceful shutdown, which closes the listeners."""
    # Half for clients, so that the gateway can still reach replicas, however many clients come.
    most_connections = open_files_limit() // 2
    server = Server(app.accept, grace_s=config.timeouts.shutdown_s, most_connections=most_connections, probes=PROBES)
    serve = asyncio.create_task(server.serve(listeners))
    serve.add_done_callback(lambda _: server.listening.set())
    await server.listening.wait()
    if serve.done():
        await serve
    try:
        yield server
    finally:
        server.stop()
        await serve
        await _abort_rest(server)


async def _abort_rest(server: Server) -> None:
    """Abort the requests that still run after the grace."""
    if count := server.stop_rest():
        structlog.get_logger().warning("requests_aborted", count=count)
    tasks = set(server.tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_ABORT_S)
