"""One emulated replica as a process or, in tests, inside one: sockets, the engine's loop, a clean end."""

from __future__ import annotations

import asyncio
import signal
import sys
from types import TracebackType
from typing import Self

from preble.core.costs.model import CostModel
from preble.core.types import Role
from preble.emulator.answers.placeholders import EmulatedMedia
from preble.emulator.answers.tokenizer import load_tokenizer
from preble.emulator.app import EmulatorApp
from preble.emulator.config import EmulatorConfig
from preble.emulator.engine import EmulatedEngine
from preble.emulator.kv.events import KvEventPublisher
from preble.emulator.pairs.decoding import Decode
from preble.emulator.pairs.rooms import DEFAULT_BOOTSTRAP_PORT, Prefill
from preble.errors import ConfigError
from preble.profiles import load_profile
from preble.web.server.listening import listen, url_of
from preble.web.server.server import Server

GRACE_S = 5
"""Requests that still run this long after the signal to stop are cut off."""


class EmulatorServer:
    """A running emulated replica. Enter it to listen, leave it to stop; `url` is known inside.

    Raises, on construction: ConfigError: no such profile or tokenizer. On entering: ConfigError: a port is taken.
    """

    def __init__(self, config: EmulatorConfig) -> None:
        self.config = config
        self._profile = load_profile(config.profile)
        if config.kv_tokens is None and self._profile.kv_capacity_tokens < 2 * config.block_size:
            raise ConfigError(f"profile {config.profile!r} has a KV cache of less than two blocks; give kv_tokens")
        self._tokenizer = load_tokenizer(config.tokenizer)
        self._media = EmulatedMedia(config.image_tokens)
        self.publishers: list[KvEventPublisher] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        return url_of(self.config.host, self.port)

    async def __aenter__(self) -> Self:
        listeners = [listen(self.config.host, self.config.port)]
        try:
            if self.config.role is Role.PREFILL:
                listeners.append(listen(self.config.host, self.config.bootstrap_port))
            self._bind_publishers()
        except BaseException:
            for listener in listeners:
                listener.close()
            self._close_publishers()
            raise
        self.port, *others = (listener.getsockname()[1] for listener in listeners)
        cost_model = CostModel(self._profile)
        silent: list[KvEventPublisher | None] = [None] * self.config.data_parallel_size
        publishers = [*self.publishers] if self.publishers and self._caches else silent
        self.engines = [EmulatedEngine(self.config, cost_model, self._tokenizer, p) for p in publishers]
        self.bootstrap_port: int = others[0] if others else DEFAULT_BOOTSTRAP_PORT
        app = EmulatorApp(
            self.config,
            self._profile.name,
            self.engines,
            self._tokenizer,
            self._media,
            self.publishers,
            self._side(cost_model),
            self.bootstrap_port,
        )
        self._http = Server(app.accept, grace_s=GRACE_S)
        self._engine_tasks = [asyncio.create_task(engine.run(), name="emulated engine") for engine in self.engines]
        self._http_task = asyncio.create_task(self._http.serve(listeners), name="emulator http")
        replays = [asyncio.create_task(p.serve_replay(), name="kv event replay") for p in self.publishers]
        self._tasks = [*self._engine_tasks, self._http_task, *replays]
        return self

    @property
    def _caches(self) -> bool:
        """Whether prefixes of one request serve the next, and are announced."""
        return self.config.role is not Role.DECODE or self.config.decode_caches

    def _side(self, cost_model: CostModel) -> Prefill | Decode | None:
        match self.config.role:
            case Role.PREFILL:
                return Prefill(cost_model, self.config.speed)
            case Role.DECODE:
                caches, failures = self.config.decode_caches, self.config.failures
                return Decode(self.config.speed, caches=caches, failures=failures, mooncake=self.config.mooncake)
            case _:
                return None

    @property
    def engine(self) -> EmulatedEngine:
        """The engine of the first rank."""
        return self.engines[0]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finish what runs (for at most `GRACE_S`), then end every task and close every socket."""
        self._http.stop()
        try:
            await asyncio.wait((self._http_task, *self._engine_tasks), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in self._tasks:
                task.cancel()
            outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
            self._close_publishers()
            for engine in self.engines:
                if engine.kept is not None:
                    engine.kept.close()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def failed(self) -> None:
        """Return when a part of the server has ended by itself, which it never does unless it failed."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def _bind_publishers(self) -> None:
        """Bind one publisher for each rank, at the ports plus its number. Raises: ConfigError."""
        if self.config.events_port is not None:
            for rank in range(self.config.data_parallel_size):
                self.publishers.append(KvEventPublisher(self.config, rank, self._media))

    def _close_publishers(self) -> None:
        for publisher in self.publishers:
            publisher.close()


def run(config: EmulatorConfig) -> None:
    """Serve one emulated replica until SIGINT or SIGTERM. Blocks; prints its URL on stdout once it listens.

    Raises: ConfigError.
    """
    server = EmulatorServer(config)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(server))


async def _serve(server: EmulatorServer) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with server:
        print(f"preble emulate: listening on {server.url}", flush=True)
        waits = [asyncio.create_task(stop.wait()), asyncio.create_task(server.failed())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.Loop
