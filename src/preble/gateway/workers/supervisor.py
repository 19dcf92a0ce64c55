"""A gateway of several processes: this one starts the others, restarts those that die, and gives them orders."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import structlog

from preble import background
from preble.background import Backoff
from preble.config import GatewayConfig
from preble.config.load import ConfigSources
from preble.config.reloading import in_force
from preble.errors import ConfigError
from preble.gateway.http.keys import KeyRing
from preble.gateway.reloading import Contents, contents, reload_on_change, tell_of_reload
from preble.gateway.server import print_url, tell_of_listening
from preble.gateway.workers.count import own_engine
from preble.gateway.workers.process import (
    PRIVATE,
    SCHEDULER,
    Cover,
    Drain,
    Failed,
    Order,
    Ready,
    Reconfigured,
    Reply,
    Settings,
    Start,
    Stop,
    run_process,
)
from preble.web.listening import inherited, listen_shared
from preble.web.open_files import raise_open_files_limit

_SPAWN = multiprocessing.get_context("spawn")
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 30.0
_MARGIN_S = 15.0
"""How long a process may take to end after the grace for running requests."""
_READY_S, _ANSWER_S = 120.0, 30.0
"""How long a reload waits for a process that starts, and for one that gets new settings."""
_NO_PROCESS = "the system starts no further process for the gateway"
_LONG_LIFE_S = 60.0
"""A process that has lived this long restarts at once; a younger one after a pause."""


def run_workers(
    config: GatewayConfig,
    count: int,
    on_listening: Callable[[str], None] | None = None,
    *,
    sources: ConfigSources | None = None,
    log: tuple[str, str],
) -> None:
    """As `server.run`, with `count` front-end processes and a scheduler process.

    `log`: level and format of what each process logs. Raises: ConfigError: a setting is unusable.
    """
    raise_open_files_limit()
    keys = KeyRing(config.auth, config.queue.classes)
    with _socket_path(config) as path:
        given = inherited(os.environ)
        listeners = [given] if given is not None else listen_shared(config.host, config.port, count)
        try:
            settings = Settings(config, keys)
            workers = _Workers(settings, count, sources, path, listeners, takes_over=given is not None, log=log)
            asyncio.run(workers.serve(on_listening or print_url))
        finally:
            for listener in listeners:
                listener.close()


@contextlib.contextmanager
def _socket_path(config: GatewayConfig) -> Iterator[Path]:
    """The path of the scheduler's socket, in a folder of its own unless it is configured. Raises: ConfigError."""
    if config.scheduler_socket is not None:
        yield Path(config.scheduler_socket).expanduser()
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix=PRIVATE, ignore_cleanup_errors=True)
    except OSError as error:
        text = f"no folder for the scheduler's socket can be made: {error.strerror or error}"
        raise ConfigError(f"{text}; set TMPDIR to a folder that can be written, or set scheduler_socket") from error
    with folder:
        yield Path(folder.name) / "scheduler.sock"


class _Workers:
    """All processes of a gateway but this one."""

    def __init__(
        self,
        settings: Settings,
        count: int,
        sources: ConfigSources | None,
        path: Path,
        listeners: list[socket.socket],
        *,
        takes_over: bool,
        log: tuple[str, str],
    ) -> None:
        self._settings = settings
        self._sources = sources
        self._listeners = listeners
        self._log = structlog.get_logger()
        self._is_draining = self._is_stopping = False

        def start(name: str, number: int | None) -> Start:
            given = () if number is None else tuple(listeners)
            return Start(name, self._settings, path, count, number, given, takes_over, log)

        self._scheduler = _Worker(partial(start, SCHEDULER, None), lambda: None)
        self._front_ends = [
            _Worker(partial(start, f"front-end-{number + 1}", number), self._cover) for number in range(count)
        ]

    def _cover(self) -> None:
        """Have the first living front end accept connections in place of the dead ones, unless all are to end."""
        if self._is_stopping:
            return
        dead = tuple(number for number, front_end in enumerate(self._front_ends) if front_end.is_dead)
        living = [front_end for front_end in self._front_ends if not front_end.is_dead]
        for front_end in living:
            front_end.order(Cover(dead if front_end is living[0] else ()))

    @property
    def _config(self) -> GatewayConfig:
        return self._settings.config

    async def serve(self, tell: Callable[[str], None]) -> None:
        """Run all processes until SIGINT or SIGTERM. Raises: ConfigError: one cannot start."""
        known = await contents(self._config, self._sources)
        try:
            await self._scheduler.start()  # alone: what it refuses is said at once
            await asyncio.gather(*(front_end.start() for front_end in self._front_ends))
            stop, reload = self._handle_signals()
            has_keys = self._settings.keys.has_keys
            tell(tell_of_listening(self._listeners[0], self._config, has_keys=has_keys))
            await self._until_stopped(stop, reload, known)
        finally:
            self._is_stopping = True
            for listener in self._listeners:
                listener.close()
            grace_s = self._config.timeouts.shutdown_s + _MARGIN_S
            await asyncio.gather(*(front_end.stop(grace_s) for front_end in self._front_ends))
            await self._scheduler.stop(grace_s)

    def _handle_signals(self) -> tuple[asyncio.Event, asyncio.Event]:
        """Return what is set when this process shall stop, and when it shall reload."""
        loop, stop, reload = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        loop.add_signal_handler(signal.SIGINT, self._on_signal, stop, False)
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, stop, True)
        loop.add_signal_handler(signal.SIGHUP, reload.set)
        return stop, reload

    async def _until_stopped(self, stop: asyncio.Event, reload: asyncio.Event, known: Contents) -> None:
        follow = partial(reload_on_change, lambda: self._config, self._sources, known, reload.set)
        following = background.keep(follow, "configuration watch")
        reloading = background.keep(partial(self._reload_whenever, reload), "reloads")
        try:
            await stop.wait()
        finally:
            following.cancel()
            reloading.cancel()

    def _on_signal(self, stop: asyncio.Event, drains: bool) -> None:
        drain_s = self._config.timeouts.drain_s if drains else 0.0
        if self._is_draining:
            drain_s = 0.0
            for front_end in self._front_ends:
                front_end.order(Stop(hurries=True))
        else:
            self._log.info("draining")
        self._is_draining = True
        for worker in (self._scheduler, *self._front_ends):
            worker.order(Drain())
        asyncio.get_running_loop().call_later(drain_s, stop.set)

    async def _reload_whenever(self, wanted: asyncio.Event) -> None:
        while True:
            await wanted.wait()
            wanted.clear()
            try:
                await self._reload()
            except _NotNow as error:
                self._log.warning("reload_waits", error=str(error), consequence="nothing has changed; we try again")
                wanted.set()
            except ConfigError as error:
                self._log.error("reload_failed", error=str(error), consequence="everything stays as it was")

    async def _reload(self) -> None:
        """Read the configuration and the keys once more, and have every process use them.

        Raises: ConfigError: they are unusable. _NotNow: the scheduler process is dead. Then nothing has changed.
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

    async def _reconfigure(self, front_end: _Worker) -> None:
        """Have a front end use the settings that the scheduler process has taken: also by starting it anew."""
        try:
            refusal = await front_end.reconfigured(self._settings)
        except _NotNow as error:
            refusal = str(error)
        if refusal is not None:
            consequence = "it starts again, with the new settings"
            self._log.error("reload_refused", name=front_end.name, error=refusal, consequence=consequence)
            front_end.kill_unless_it_has(self._settings)


class _NotNow(ConfigError):
    """A process has died, or does not answer and was killed: its successor may take the settings."""


class _Worker:
    """One process, restarted whenever it dies. `start`: returns what the process gets, at each start. `on_change`:
    called when it has died, and when it works again."""

    def __init__(self, start: Callable[[], Start], on_change: Callable[[], None]) -> None:
        self._start = start
        self._on_change = on_change
        self._process: SpawnProcess | None = None
        self._control: Connection | None = None
        self._ready = asyncio.Event()
        self._died = asyncio.Event()
        self._given: Settings | None = None
        self._answer: asyncio.Future[Reconfigured | None] | None = None
        self._sender = ThreadPoolExecutor(1)
        """Sends orders: a process that hangs does not read them."""
        self._error: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._has_died = False
        self.name = ""

    @property
    def is_dead(self) -> bool:
        """Whether it has died and its successor is not ready yet."""
        return self._has_died and not self._ready.is_set()

    async def start(self) -> None:
        """Start it, and keep it running. Raises: ConfigError: it cannot start."""
        try:
            self._begin()
        except OSError as error:
            raise ConfigError(f"{_NO_PROCESS}: {error.strerror or error}") from error
        ready, died = (asyncio.create_task(event.wait()) for event in (self._ready, self._died))
        await asyncio.wait((ready, died), return_when=asyncio.FIRST_COMPLETED)
        for waiting in (ready, died):
            waiting.cancel()
        if not self._ready.is_set():
            raise ConfigError(self._error or "a process of the gateway ended at its start; read its log")
        self._task = background.keep(self._keep, f"restarts of {self.name}")

    def _begin(self) -> None:
        """Raises: OSError: the system has no process, memory or file left for it."""
        start = self._start()
        self.name = start.name
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=run_process, args=(start, theirs), name=f"preble-{start.name}")
        try:
            process.start()
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._ready.clear()
        self._died.clear()
        self._process, self._control, self._given = process, ours, start.settings
        loop = asyncio.get_running_loop()
        loop.add_reader(ours.fileno(), self._hear, ours)
        loop.add_reader(process.sentinel, self._end, process, ours)

    def _hear(self, control: Connection) -> None:
        try:
            self._take(control.recv())
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(control.fileno())

    def _take(self, reply: Reply) -> None:
        match reply:
            case Ready():
                self._ready.set()
                if self._has_died:
                    self._on_change()
            case Failed(error):
                self._error = error
            case Reconfigured():
                self._answered(reply)

    def _answered(self, reply: Reconfigured | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(reply)

    def _end(self, process: SpawnProcess, control: Connection) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.sentinel)
        loop.remove_reader(control.fileno())
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._take(control.recv())
        control.close()
        process.join()
        self._control = None
        self._ready.clear()
        self._died.set()
        self._has_died = True
        self._on_change()
        self._answered(None)

    async def _keep(self) -> None:
        loop, backoff = asyncio.get_running_loop(), Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S)
        while True:
            began = loop.time()
            await self._died.wait()
            if self._is_stopping:
                return
            if loop.time() - began > _LONG_LIFE_S:
                backoff.reset()
            code = self._process.exitcode if self._process is not None else None
            wait_s = backoff.next_s()
            structlog.get_logger().error(
                "process_died", name=self.name, exit=code, error=self._error, starts_again_in_s=round(wait_s, 2)
            )
            await asyncio.sleep(wait_s)
            self._error = None
            if self._is_stopping:
                return
            try:
                self._begin()
            except OSError as error:
                self._error = f"{_NO_PROCESS}: {error.strerror or error}"

    def order(self, order: Order) -> None:
        """Give an order; nothing happens if the process is dead."""
        if self._control is not None:
            self._sender.submit(_send, self._control, order)

    async def reconfigured(self, settings: Settings) -> str | None:
        """Have it use these settings; return its refusal, None if it has them. Kills it if it does not answer.

        Raises: _NotNow: it does not have them, and a successor may take them.
        """
        try:
            async with asyncio.timeout(_READY_S):
                await self._ready.wait()
        except TimeoutError:
            raise _NotNow(f"the process {self.name} does not start") from None
        if self._given is settings:  # since its start
            return None
        process, self._answer = self._process, asyncio.get_running_loop().create_future()
        self.order(settings)
        try:
            async with asyncio.timeout(_ANSWER_S):
                reply = await self._answer
        except TimeoutError:
            if process is not None:
                process.kill()
            raise _NotNow(f"the process {self.name} did not answer for {_ANSWER_S:g} s, and was killed") from None
        if reply is None:
            raise _NotNow(f"the process {self.name} has died")
        if reply.error is None:
            self._given = settings
        return reply.error

    def kill_unless_it_has(self, settings: Settings) -> None:
        """Have it start again if these are not its settings."""
        if self._given is not settings and self._process is not None:
            self._process.kill()

    async def stop(self, grace_s: float) -> None:
        """Have it end, and wait until it has. Kills it after `grace_s`."""
        self._is_stopping = True
        self.order(Stop())
        if self._process is not None:
            try:
                async with asyncio.timeout(grace_s):
                    await self._died.wait()
            except TimeoutError:
                self._process.kill()
                await self._died.wait()
        if self._task is not None:
            self._task.cancel()
        self._sender.shutdown(wait=False)


def _send(control: Connection, order: Order) -> None:
    with contextlib.suppress(OSError):  # it has died
        control.send(order)
