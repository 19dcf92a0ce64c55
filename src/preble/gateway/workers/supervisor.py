"""A gateway of several processes: this one starts the others, restarts those that die, and gives them orders."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import structlog

from preble import background
from preble.config import GatewayConfig
from preble.config.load import ConfigSources
from preble.config.reloading import in_force
from preble.errors import ConfigError
from preble.gateway import signals
from preble.gateway.handover import Inherited, Upgrade
from preble.gateway.http.access import KeyRing
from preble.gateway.reloading import Contents, contents, reload_on_change, reload_whenever, tell_of_reload
from preble.gateway.server import print_url, tell_of_listening
from preble.gateway.workers.count import own_engine
from preble.gateway.workers.messages import Cover, Drain, Settings, Start, Stop
from preble.gateway.workers.process import PRIVATE, SCHEDULER, remove_socket
from preble.gateway.workers.worker import NotNow, WorkerProcess
from preble.web.server.listening import listen_shared
from preble.web.server.open_files import raise_open_files_limit

_SOCKET = "scheduler.sock"
_YOUNG_S = 60.0
"""A socket that is younger may be about to be served."""
_MARGIN_S = 15.0
"""How long a process may take to end after the grace for running requests."""


def run_workers(
    config: GatewayConfig,
    count: int,
    *,
    sources: ConfigSources | None = None,
    log: tuple[str, str],
) -> None:
    """Do as `server.run`, with `count` front-end processes and a scheduler process.

    `log`: level and format of what each process logs. Raises: ConfigError: a setting is unusable.
    """
    raise_open_files_limit()
    keys = KeyRing(config.auth, config.queue.classes)
    origin = Inherited(os.environ)
    with _socket_path(config) as path:
        listeners = origin.listeners or listen_shared(config.host, config.port, count)
        try:
            settings = Settings(config, keys)
            workers = _Workers(settings, count, sources, path, listeners, origin, log)
            asyncio.run(workers.serve())
        finally:
            for listener in listeners:
                listener.close()


@contextlib.contextmanager
def _socket_path(config: GatewayConfig) -> Iterator[Path]:
    """Yield the path of the scheduler's socket, in a folder of its own unless it is configured. Raises: ConfigError."""
    if config.scheduler_socket is not None:
        yield Path(config.scheduler_socket).expanduser()
        return
    _remove_dead()
    try:
        folder = tempfile.TemporaryDirectory(prefix=PRIVATE, ignore_cleanup_errors=True)
    except OSError as error:
        text = f"no folder for the scheduler's socket can be made: {error.strerror or error}"
        raise ConfigError(f"{text}; set TMPDIR to a folder that can be written, or set scheduler_socket") from error
    with folder:
        yield Path(folder.name) / _SOCKET


def _remove_dead() -> None:
    """Remove the private sockets, with their folders, of gateways of which every process was killed."""
    with contextlib.suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{PRIVATE}*/{_SOCKET}"):
            with socket.socket(socket.AF_UNIX) as asking:
                asking.setblocking(False)  # a scheduler that hangs may have a full backlog
                is_dead = asking.connect_ex(str(path)) == errno.ECONNREFUSED
                if is_dead and time.time() - path.stat().st_mtime > _YOUNG_S:
                    remove_socket(path)


class _Workers:
    """All processes of a gateway but this one."""

    def __init__(
        self,
        settings: Settings,
        count: int,
        sources: ConfigSources | None,
        path: Path,
        listeners: list[socket.socket],
        origin: Inherited,
        log: tuple[str, str],
    ) -> None:
        self._settings = settings
        self._sources = sources
        self._listeners = listeners
        self._origin = origin
        self._upgrading = Upgrade(self._leave)
        self._log = structlog.get_logger()
        self._reload_wanted, self._stopped = asyncio.Event(), asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._is_draining = self._is_told_to_stop = self._is_stopping = False
        self._has_started = self._has_left = False

        def start(name: str, number: int | None) -> Start:
            given = () if number is None else tuple(listeners)
            is_first = not self._has_started
            return Start(name, self._settings, path, count, number, given, bool(origin.listeners), is_first, log)

        self._scheduler = WorkerProcess(partial(start, SCHEDULER, None), lambda: None)
        self._front_ends = [
            WorkerProcess(partial(start, f"front-end-{number + 1}", number), self._cover) for number in range(count)
        ]

    def _cover(self) -> None:
        """Have the first living front end accept connections in place of those that are away, unless all shall end."""
        if self._is_stopping:
            return
        away = tuple(number for number, front_end in enumerate(self._front_ends) if front_end.is_away)
        living = [front_end for front_end in self._front_ends if not front_end.is_away]
        for front_end in living:
            front_end.order(Cover(away if front_end is living[0] else ()))

    @property
    def _config(self) -> GatewayConfig:
        return self._settings.config

    async def serve(self) -> None:
        """Run all processes until SIGINT or SIGTERM. Raises: ConfigError: one cannot start."""
        signals.act_on(self._stop, self._reload_wanted.set, self._upgrade)
        self._main = asyncio.current_task()
        try:
            known = await contents(self._config, self._sources)
            await asyncio.gather(*(worker.start() for worker in (self._scheduler, *self._front_ends)))
            self._has_started = True
            has_keys = self._settings.keys.has_keys
            print_url(tell_of_listening(self._listeners[0], self._config, has_keys=has_keys))
            self._origin.serves()
            await self._until_stopped(known)
        except asyncio.CancelledError:
            if not self._is_draining:
                raise
            self._log.info("stopped_at_start")
        finally:
            self._is_stopping = True
            for listener in self._listeners:
                listener.close()
            timeouts = self._config.timeouts
            grace_s = (timeouts.total_s if self._has_left else timeouts.shutdown_s) + _MARGIN_S
            await self._upgrading.ended()
            await asyncio.gather(*(front_end.stop(grace_s) for front_end in self._front_ends))
            await self._scheduler.stop(grace_s)

    async def _until_stopped(self, known: Contents) -> None:
        follow = partial(reload_on_change, lambda: self._config, self._sources, known, self._reload_wanted.set)
        following = background.keep(follow, "configuration watch")
        reloading = background.keep(partial(reload_whenever, self._reload_wanted, self._try_to_reload), "reloads")
        try:
            await self._stopped.wait()
        finally:
            following.cancel()
            reloading.cancel()

    def _upgrade(self) -> None:
        if self._has_started and not self._is_draining:
            self._upgrading.begin(self._listeners, self._config)

    def _leave(self) -> None:
        """Accept no more, and drain: the successor serves. What runs may end, however long that takes."""
        self._is_draining = self._is_stopping = self._has_left = True
        for worker in (self._scheduler, *self._front_ends):
            worker.order(Drain(leaves=True))
        asyncio.get_running_loop().call_later(self._config.timeouts.drain_s, self._stopped.set)

    def _stop(self, drains: bool) -> None:
        """Obey a signal: end the start, or drain and then stop, or hurry."""
        self._upgrading.cancel()
        timeouts, is_second, self._is_told_to_stop = self._config.timeouts, self._is_told_to_stop, True
        drain_s = timeouts.drain_s if drains and self._has_started and not self._is_draining else 0.0
        if self._is_draining:  # told to stop twice, or once after a handover
            for front_end in self._front_ends:
                front_end.order(Stop(within_s=0.0 if is_second else timeouts.shutdown_s))
        else:
            self._log.info("draining")
        self._is_draining = True
        for worker in (self._scheduler, *self._front_ends):
            worker.order(Drain(leaves=self._has_left))
        if self._has_started:
            asyncio.get_running_loop().call_later(drain_s, self._stopped.set)
        elif self._main is not None and not is_second:
            self._main.cancel()

    async def _try_to_reload(self) -> None:
        try:
            await self._reload()
        except NotNow as error:
            self._log.warning("reload_waits", error=str(error), consequence="nothing has changed; we try again")
            self._reload_wanted.set()
        except ConfigError as error:
            self._log.error("reload_failed", error=str(error), consequence="everything stays as it was")

    async def _reload(self) -> None:
        """Read the configuration and the keys once more, and have every process use them.

        Raises: ConfigError: they are unusable. NotNow: the scheduler process is dead. Then nothing has changed.
        """
        old = self._config
        read = old if self._sources is None else self._sources.load()
        config = in_force(old, read)
        if config.workers is None and (own := own_engine(config)) is not None:
            text = f"the engine {own!r} may be an adapter of your own, which needs a gateway of one process"
            raise ConfigError(f"{text}: restart it, or set `workers` if the adapter learns nothing by probing")
        settings = Settings(config, KeyRing(config.auth, config.queue.classes))
        if (refusal := await self._scheduler.reconfigured(settings)) is not None:
            raise ConfigError(refusal)
        self._settings = settings
        await asyncio.gather(*(self._reconfigure(front_end) for front_end in self._front_ends))
        tell_of_reload(old, read, settings.keys.num_keys)

    async def _reconfigure(self, front_end: WorkerProcess) -> None:
        """Have a front end use the settings that the scheduler process has taken: also by starting it anew."""
        try:
            refusal = await front_end.reconfigured(self._settings)
        except NotNow as error:
            refusal = str(error)
        if refusal is not None:
            consequence = "it starts again, with the new settings"
            self._log.error("reload_refused", name=front_end.name, error=refusal, consequence=consequence)
            front_end.kill_unless_it_has(self._settings)
