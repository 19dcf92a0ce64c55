"""One process of a gateway, seen from the first one: started, asked whether it lives, restarted when it has died."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import structlog

from preble import background
from preble.background import Backoff
from preble.errors import ConfigError
from preble.gateway import signals
from preble.gateway.workers.messages import (
    Drain,
    Failed,
    Order,
    Ping,
    PingReply,
    Ready,
    Reconfigured,
    Reply,
    Settings,
    Start,
    Stop,
)
from preble.gateway.workers.process import run_process

BEAT_S = 1.0
SILENT_BEATS = 3
"""A process that has not answered for so many beats is silent: others stand in for it."""
HUNG_BEATS = 15
"""One that has not answered for so many is killed. Beats, not seconds: if this process itself is stopped or starved, it
sends none. A front end's longest turn of the event loop, and the longest reload, are far shorter."""
_SPAWN = multiprocessing.get_context("spawn")
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 30.0
_READY_S = 120.0
"""How long a reload waits for a process that starts."""
_NO_PROCESS = "the system starts no further process for the gateway"
_LONG_LIFE_S = 60.0
"""A process that has lived this long restarts at once; a younger one after a pause."""


class NotNow(ConfigError):
    """A process has died: its successor may take the settings."""


class WorkerProcess:
    """One process, restarted whenever it dies, and killed when it hangs.

    `start`: returns what the process gets, at each start. `on_change`: called when it is away, and when it is back.
    """

    def __init__(self, start: Callable[[], Start], on_change: Callable[[], None]) -> None:
        self._start = start
        self._on_change = on_change
        self._process: SpawnProcess | None = None
        self._control: Connection | None = None
        self._ready = asyncio.Event()
        self._died = asyncio.Event()
        self._given: Settings | None = None
        self._drain: Drain | None = None
        self._answer: asyncio.Future[Reconfigured | None] | None = None
        self._sender = ThreadPoolExecutor(1)
        """Sends orders: a process that hangs does not read them."""
        self._error: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._has_died = False
        self._num_unanswered = 0
        self.name = ""

    @property
    def is_away(self) -> bool:
        """Whether it has died and its successor is not ready yet, or whether it does not answer."""
        return (self._has_died and not self._ready.is_set()) or self._num_unanswered > SILENT_BEATS

    async def start(self) -> None:
        """Start it, and keep it running. Raises: ConfigError: it cannot start."""
        try:
            self._begin()
        except OSError as error:
            raise ConfigError(f"{_NO_PROCESS}: {error.strerror or error}") from error
        waits = [asyncio.create_task(event.wait()) for event in (self._ready, self._died)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in waits:
                waiting.cancel()
        if not self._ready.is_set():
            raise ConfigError(self._error or "a process of the gateway ended at its start; read its log")
        self._tasks = [
            background.keep(self._keep, f"restarts of {self.name}"),
            background.keep(self._beat, f"heartbeat of {self.name}"),
        ]

    def _begin(self) -> None:
        """Raises: OSError: the system has no process, memory or file left for it."""
        start = self._start()
        self.name = start.name
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=run_process, args=(start, theirs), name=f"preble-{start.name}")
        resource_tracker.ensure_running()  # else it starts within the context, and releases the signals
        try:
            with signals.held():
                process.start()
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._ready.clear()
        self._died.clear()
        self._num_unanswered = 0
        self._process, self._control, self._given = process, ours, start.settings
        loop = asyncio.get_running_loop()
        loop.add_reader(ours.fileno(), self._hear, ours)
        loop.add_reader(process.sentinel, self._end, process, ours)
        if self._drain is not None:
            self.order(self._drain)

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
            case PingReply():
                self._lives()

    async def _beat(self) -> None:
        """Ask it, as long as it is ready, whether it is alive. Kill it if it does not answer."""
        while True:
            await asyncio.sleep(BEAT_S)
            if not self._ready.is_set() or self._process is None:
                continue
            if self._num_unanswered == 0:
                self.order(Ping())
            self._num_unanswered += 1
            if self._num_unanswered == SILENT_BEATS + 1:
                structlog.get_logger().warning("process_silent", name=self.name, seconds=SILENT_BEATS * BEAT_S)
                self._on_change()
            elif self._num_unanswered > HUNG_BEATS:
                seconds = HUNG_BEATS * BEAT_S
                structlog.get_logger().error("process_hangs", name=self.name, seconds=seconds, consequence="killed")
                self._process.kill()

    def _lives(self) -> None:
        was_away, self._num_unanswered = self.is_away, 0
        if was_away:
            self._on_change()

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
            if loop.time() - began > _LONG_LIFE_S:
                backoff.reset()
            code = self._process.exitcode if self._process is not None else None
            wait_s = backoff.next_s()
            structlog.get_logger().error(
                "process_died", name=self.name, exit=code, error=self._error, starts_again_in_s=round(wait_s, 2)
            )
            await asyncio.sleep(wait_s)
            self._error = None
            try:
                self._begin()
            except OSError as error:
                self._error = f"{_NO_PROCESS}: {error.strerror or error}"

    def order(self, order: Order) -> None:
        """Give an order. Nothing happens if the process is dead; its successor is told only to drain."""
        if isinstance(order, Drain):
            self._drain = order
        if self._control is not None:
            self._sender.submit(_send, self._control, order)

    async def reconfigured(self, settings: Settings) -> str | None:
        """Have it use these settings; return its refusal, None if it has them.

        Raises: NotNow: it does not have them, and a successor may take them.
        """
        try:
            async with asyncio.timeout(_READY_S):
                await self._ready.wait()
        except TimeoutError:
            raise NotNow(f"the process {self.name} does not start") from None
        if self._given is settings:  # since its start
            return None
        self._answer = asyncio.get_running_loop().create_future()
        self.order(settings)
        reply = await self._answer
        if reply is None:
            raise NotNow(f"the process {self.name} has died")
        if reply.error is None:
            self._given = settings
        return reply.error

    def kill_unless_it_has(self, settings: Settings) -> None:
        """Have it start again if these are not its settings."""
        if self._given is not settings and self._process is not None:
            self._process.kill()

    async def stop(self, grace_s: float) -> None:
        """Have it end, and wait until it has. Kills it after `grace_s`."""
        for task in self._tasks:
            task.cancel()
        self.order(Stop())
        if self._process is not None:
            try:
                async with background.time_limit(grace_s):
                    await self._died.wait()
            except TimeoutError:
                self._process.kill()
                await self._died.wait()
        self._sender.shutdown(wait=False)


def _send(control: Connection, order: Order) -> None:
    with contextlib.suppress(OSError):  # it has died
        control.send(order)
