"""What each process of a gateway with several runs: the scheduler process, or a front end. See `workers`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from msgspec import Struct

from preble.config import GatewayConfig
from preble.errors import ConfigError
from preble.gateway.app import App
from preble.gateway.front_app import FrontApp, answer_passed_on
from preble.gateway.server import accepting, prepared_process, until_one_is_up
from preble.logs import LogLosses, configure_logging
from preble.serving import FrontEnd, Serving

SCHEDULER = "scheduler"
_LED_S = 60.0
"""How long a front end waits for the scheduler process before it accepts connections without one."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a process is given. `listener`: of a front end; None for the scheduler process.

    `path`: of the scheduler's socket. `share`: how many front ends there are. `takes_over`: another gateway may still
    accept at the listener. `log`: level and format.
    """

    name: str
    config: GatewayConfig
    path: Path
    share: int
    listener: socket.socket | None
    takes_over: bool
    log: tuple[str, str]


class Reconfigure(Struct):
    """An order: use these settings. Answered with `Reconfigured`."""

    config: GatewayConfig


class Drain(Struct):
    """An order: serve on, but let nobody count on it."""


class Stop(Struct):
    """An order: end. `hurries`: do not wait for running requests."""

    hurries: bool = False


class Ready(Struct):
    """The process does its work."""


class Failed(Struct):
    """The process cannot start, because of the configuration."""

    error: str


class Reconfigured(Struct):
    """`error`: why nothing has changed, None if it has. `num_keys`: that are accepted now."""

    error: str | None
    num_keys: int = 0


Order = Reconfigure | Drain | Stop
Reply = Ready | Failed | Reconfigured


def run_process(start: Start, control: Connection) -> None:
    """The whole life of one process: serve until told to stop. If the process that started it dies, it ends at once."""
    # A terminal and systemd send signals to every process; only the first one acts on them, and gives orders.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log_losses = configure_logging(*start.log)
    serve = _schedule if start.listener is None else _serve_clients
    try:
        with prepared_process() as runner:
            runner.run(serve(start, _Orders(control), log_losses))
    except ConfigError as error:
        control.send(Failed(str(error)))


class _Orders:
    """Carries out what the first process says."""

    def __init__(self, control: Connection) -> None:
        self._control = control
        self.stop: asyncio.Event
        self.hurry: Callable[[], None] = lambda: None

    def follow(self, app: App) -> None:
        """Carry orders out from now on, and say that this process is ready."""
        self._app = app
        self.stop = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._take)
        self._control.send(Ready())

    def _take(self) -> None:
        try:
            order: Order = self._control.recv()
        except (EOFError, OSError):
            os._exit(1)
        match order:
            case Reconfigure(config):
                self._control.send(self._reconfigure(config))
            case Drain():
                self._app.is_draining = True
            case Stop(hurries):
                if hurries:
                    self.hurry()
                self.stop.set()

    def _reconfigure(self, config: GatewayConfig) -> Reconfigured:
        try:
            return Reconfigured(None, self._app.reconfigure(config))
        except ConfigError as error:
            return Reconfigured(str(error))


async def _schedule(start: Start, orders: _Orders, log_losses: LogLosses) -> None:
    serving = await Serving.start(start.config, log_losses=log_losses, process=start.name)
    try:
        app = App(start.config, serving)
        await serving.listen(start.path, partial(answer_passed_on, app))
        orders.follow(app)
        await orders.stop.wait()
    finally:
        await serving.close()


async def _serve_clients(start: Start, orders: _Orders, log_losses: LogLosses) -> None:
    assert start.listener is not None
    config = start.config
    front_end = await FrontEnd.connect(config, start.path, name=start.name, share=start.share, log_losses=log_losses)
    try:
        app = FrontApp(config, front_end, start.share)
        await _until_led(front_end)
        if start.takes_over:
            await until_one_is_up(front_end, config.health.check_timeout_s)
        async with accepting(app, start.listener, config) as server:
            orders.hurry = lambda: setattr(server, "force_exit", True)
            orders.follow(app)
            await orders.stop.wait()
    finally:
        await front_end.close()


async def _until_led(front_end: FrontEnd) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LED_S):
            while not front_end.is_led:  # noqa: ASYNC110 (the link connects with nobody to tell)
                await asyncio.sleep(0.01)
