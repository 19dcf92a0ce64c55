"""What each process of a gateway with several runs: the scheduler process, or a front end. See `workers`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import structlog

from preble.errors import ConfigError
from preble.gateway import signals
from preble.gateway.app import App
from preble.gateway.server import accepting, prepared_process, until_settled
from preble.gateway.workers.front_app import FrontApp
from preble.gateway.workers.messages import (
    Cover,
    Drain,
    Failed,
    Order,
    Ping,
    PingReply,
    Ready,
    Reconfigured,
    Settings,
    Start,
    Stop,
)
from preble.logs import LogLosses, configure_logging
from preble.serving import FrontEnd, Serving
from preble.web.server.server import Server

SCHEDULER = "scheduler"
PRIVATE = "preble-"
"""The beginning of a folder's name, if the folder was made only for the socket."""
_LED_S = 60.0
"""How long a front end that starts again waits for the scheduler process before it accepts connections without one."""


def run_process(start: Start, control: Connection) -> None:
    """Serve until the order to stop. If the process that started this one dies, this one ends at once."""
    # A terminal and systemd send signals to every process; only the first one acts on them, and gives orders.
    signals.ignore()
    log_losses = configure_logging(*start.log)
    try:
        with prepared_process() as runner:
            runner.run(_serve_until_stopped(start, control, log_losses))
    except ConfigError as error:
        with contextlib.suppress(OSError):  # the first process has died
            control.send(Failed(str(error)))


async def _serve_until_stopped(start: Start, control: Connection, log_losses: LogLosses) -> None:
    orders = _Orders(control)
    serve = _schedule if start.number is None else _serve_clients
    try:
        await serve(start, orders, log_losses)
    except asyncio.CancelledError:
        if not orders.stop.is_set():
            raise


class _Orders:
    """Carries out the orders of the first process, from the making of this on."""

    def __init__(self, control: Connection) -> None:
        self._control = control
        self._main = asyncio.current_task()
        self._app: App | None = None
        self._drain: Drain | None = None
        self.stop = asyncio.Event()
        self.hurry: Callable[[float], None] = lambda _: None
        self.leave: Callable[[], None] = lambda: None
        self.orphaned: Callable[[], None] = lambda: None
        self.cover: Callable[[tuple[int, ...]], None] = lambda _: None
        asyncio.get_running_loop().add_reader(control.fileno(), self._take)

    def ready(self, app: App) -> None:
        """Say that this process is ready: `app` serves."""
        self._app = app
        if self._drain is not None:
            app.drain(leaves=self._drain.leaves)
            if self._drain.leaves:
                self.leave()
        self._control.send(Ready())

    def _take(self) -> None:
        try:
            order: Order = self._control.recv()
        except (EOFError, OSError):
            self.orphaned()
            os._exit(1)
        match order:
            case Settings():
                self._control.send(Reconfigured(self._refusal(order)))
            case Ping():
                self._control.send(PingReply())
            case Cover(numbers):
                self.cover(numbers)
            case Drain(leaves):
                self._drain = order
                if self._app is not None:
                    self._app.drain(leaves=leaves)
                if leaves:
                    self.leave()
            case Stop(within_s):
                self._stop(within_s)

    def _stop(self, within_s: float | None) -> None:
        if within_s is not None:
            self.hurry(within_s)
        self.stop.set()
        if self._app is None and self._main is not None:
            self._main.cancel()  # it still starts

    def _refusal(self, settings: Settings) -> str | None:
        assert self._app is not None, "a process gets new settings once it is ready"
        try:
            self._app.reconfigure(settings.config, settings.keys)
        except ConfigError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 (the first process waits for an answer, and reports it)
            structlog.get_logger().exception("reload_failed")
            return f"{type(error).__name__}: {error}"
        return None


async def _schedule(start: Start, orders: _Orders, log_losses: LogLosses) -> None:
    config = start.settings.config
    orders.orphaned = partial(remove_socket, start.path)
    serving = await Serving.start(config, log_losses=log_losses, process=start.name)
    try:
        app = App(config, serving, start.settings.keys)
        if start.path.parent.name.startswith(PRIVATE):  # who cleans up temporary files may have removed it
            start.path.parent.mkdir(mode=0o700, exist_ok=True)
        # Front ends that go on without this process, or another gateway, know more than this one does now.
        if start.takes_over or start.path.exists():
            await until_settled(serving, config.health.check_timeout_s)
        await serving.listen(start.path, app.answer_passed_on)
        orders.ready(app)
        await orders.stop.wait()
    finally:
        await serving.close()


def remove_socket(path: Path) -> None:
    """Remove the socket, and its folder if we made it. For when the first process, which would do so, has died."""
    with contextlib.suppress(OSError):
        if path.is_socket():
            path.unlink()
        if path.parent.name.startswith(PRIVATE):
            path.parent.rmdir()


async def _serve_clients(start: Start, orders: _Orders, log_losses: LogLosses) -> None:
    assert start.number is not None
    config = start.settings.config
    front_end = await FrontEnd.connect(config, start.path, name=start.name, share=start.share, log_losses=log_losses)
    try:
        app = FrontApp(config, front_end, start.settings.keys, start.share)
        await _until_led(front_end, at_most_s=None if start.is_first else _LED_S)
        own = [start.listeners[index].dup() for index in start.indices(start.number)]
        async with accepting(app, own, config) as server:
            orders.hurry = server.hurry
            orders.leave = lambda: server.leave(config.timeouts.total_s)
            orders.cover = _Covering(server, start).cover
            orders.ready(app)
            await orders.stop.wait()
            for listener in start.listeners:
                listener.close()  # as all processes do: from now on connections are refused
    finally:
        await front_end.close()


class _Covering:
    """Accepts in place of front ends that are dead."""

    def __init__(self, server: Server, start: Start) -> None:
        self._server = server
        self._start = start
        self._now: dict[int, asyncio.Task[asyncio.Server]] = {}
        """By the listener's index."""

    def cover(self, numbers: tuple[int, ...]) -> None:
        assert self._start.number is not None
        wanted = {index for number in numbers for index in self._start.indices(number)}
        wanted -= set(self._start.indices(self._start.number))
        for index in self._now.keys() - wanted:
            self._now.pop(index).add_done_callback(self._leave)
        for index in wanted - self._now.keys():
            self._now[index] = asyncio.create_task(self._server.accept_at(self._start.listeners[index]))

    def _leave(self, task: asyncio.Task[asyncio.Server]) -> None:
        if not task.cancelled() and task.exception() is None:
            task.result().close()
            self._server.servers.remove(task.result())


async def _until_led(front_end: FrontEnd, at_most_s: float | None) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(at_most_s):
            while not front_end.is_led:  # noqa: ASYNC110 (the link has no event for this)
                await asyncio.sleep(0.01)
