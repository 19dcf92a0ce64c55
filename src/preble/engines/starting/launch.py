"""Replicas on this machine: started, waited for, and stopped, with nothing of them left behind however we end.

Each runs under a guard process (guard.py) that holds one end of a pipe; the other end is ours. When it closes, because
we stop the replica or because this process is gone, the guard ends the replica's whole process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

from preble import background
from preble.background import Backoff
from preble.core.types import ReplicaId
from preble.engines.http import HttpClient, HttpTimeouts
from preble.engines.starting import guard
from preble.engines.starting.commands import Command, LaunchOptions, commands_for
from preble.errors import ConfigError, EngineError, EngineGone, EngineTimeout

__all__ = ["Fleet", "LaunchOptions", "ReplicaProcess"]

POLL_S = 0.1
LOG_TAIL_LINES = 20
USAGE_STATUS = 2
"""Of a program whose arguments are wrong: argparse's, click's and our own."""
_LISTENING = re.compile(r"listening on (http://\S+)")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a replica that has ended is started again: doubled each time, until it has run for ten of the longest."""


class ReplicaProcess:
    """One replica that we start ourselves. May be started again after it was stopped or killed."""

    def __init__(self, name: str, command: Command, log_path: Path, *, grace_s: float = 10.0) -> None:
        self.name = name
        self._grace_s = grace_s
        self.log_path = log_path
        self._command = command
        self._url = f"http://127.0.0.1:{command.port}" if command.port else None
        self._guard: Process | None = None
        self._pid: int | None = None

    @property
    def url(self) -> str:
        """Raises: RuntimeError: it is not known yet, wait until it is ready."""
        if self._url is None:
            raise RuntimeError(f"the URL of {self.name} is known when it is ready")
        return self._url

    @property
    def pid(self) -> int | None:
        """The engine's own process id, and that of its process group; None where it does not run."""
        return self._pid if self.is_alive else None

    @property
    def is_alive(self) -> bool:
        return self._guard is not None and self._guard.returncode is None

    async def start(self) -> None:
        """Start the program; see `wait_ready`. Once more after it has ended: its log goes on.

        Raises: ConfigError: it cannot be started.
        """
        if self.is_alive:
            raise RuntimeError(f"{self.name} runs already")
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log_line("starting", "wb" if self._guard is None else "ab")
        except OSError as error:
            why = f"{self.log_path} cannot be written: {error.strerror or error}"
            raise ConfigError(f"{self.name} cannot be started: {why}; give another folder for logs") from error
        try:
            with self.log_path.open("ab") as log:
                self._guard = await self._start_guard(log)
        except OSError as error:
            raise ConfigError(f"{self.name} cannot be started: {error}") from error
        assert self._guard.stdout is not None
        line = await self._guard.stdout.readline()
        if not line:
            await self._guard.wait()
            raise ConfigError(f"{self.name} cannot be started: {self._tail()}")
        self._pid = int(line)

    async def _start_guard(self, log: IO[bytes]) -> Process:
        argv = (sys.executable, "-I", "-S", str(guard.__file__), str(self._grace_s), *self._command.argv)
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=dict(self._command.environ),
            start_new_session=True,
        )

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when it can take requests.

        Raises: EngineGone: it ended instead; the message has the end of its log. ConfigError: so it did, since its
        arguments are wrong. EngineTimeout: not in `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_healthy()
        except TimeoutError as error:
            raise self._error(EngineTimeout, f"was not ready within {timeout_s:g} s") from error

    async def _until_healthy(self) -> None:
        while self._url is None:
            self._require_alive()
            if match := _LISTENING.search(self.log_path.read_text(errors="replace")):
                self._url = match[1]
            else:
                await asyncio.sleep(POLL_S)
        http = HttpClient(self._url, ReplicaId(self.name), timeouts=HttpTimeouts(control_s=5.0))
        try:
            while not await self._is_healthy(http):  # noqa: ASYNC110 (another process's state cannot be awaited)
                await asyncio.sleep(POLL_S)
        finally:
            await http.close()

    async def _is_healthy(self, http: HttpClient) -> bool:
        """Return whether the process at the URL is healthy and ours is still there: a port may be answered by
        another's.
        """
        self._require_alive()
        try:
            (await http.ask(self._command.ready_path)).require_ok()
        except EngineError:
            return False
        self._require_alive()
        return True

    def _require_alive(self) -> None:
        if self.is_alive:
            return
        status = self._guard.returncode if self._guard else None
        if status == USAGE_STATUS:
            raise ConfigError(f"{self.name} refuses its arguments. The end of {self.log_path}:\n{self._tail()}")
        raise self._error(EngineGone, f"ended with status {status} before it was ready")

    async def wait(self) -> int:
        """Return its exit status when it has ended."""
        if self._guard is None:
            raise RuntimeError(f"{self.name} was never started")
        return await self._guard.wait()

    async def stop(self) -> None:
        """End it and everything that it has started. Returns when it is gone; may be called twice."""
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            async with background.time_limit(self._grace_s + 5.0):
                await self._guard.wait()
        except TimeoutError:
            await self.kill()
        finally:
            self._forget_address()

    async def kill(self) -> None:
        """Kill it at once, as a crash would. Returns when it is gone."""
        if self._guard is None:
            return
        if self.is_alive and self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)  # its guard ends the rest
        await self._guard.wait()
        self._forget_address()

    def _forget_address(self) -> None:
        if self._command.port is None:
            self._url = None

    def _error(self, kind: type[EngineError], what: str) -> EngineError:
        return kind(f"{self.name} {what}. The end of {self.log_path}:\n{self._tail()}", replica_id=self.name)

    def _tail(self) -> str:
        """Return the end of its log, and why there may be no more of it: an engine ends, too, if its disk is full."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        except OSError:
            return "(there is no log)"
        try:
            self._log_line("did not start", "ab")
        except OSError as error:
            lines.append(f"(the log takes no more: {error.strerror or error})")
        return "\n".join(lines)

    def _log_line(self, what: str, mode: Literal["wb", "ab"]) -> None:
        with self.log_path.open(mode, buffering=0) as log:
            log.write(f"preble: {self.name} {what}\n".encode())


async def keep_running(replica: ReplicaProcess, ready_timeout_s: float, say: Callable[[str], None]) -> None:
    """Start the replica again whenever it ends, with growing pauses, until cancelled. `say`: what has happened."""
    loop = asyncio.get_running_loop()
    backoff, ready_at = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, rng=None), loop.time()
    while True:
        status = await replica.wait()
        if loop.time() - ready_at > 10 * LONGEST_PAUSE_S:
            backoff.reset()
        pause_s = backoff.next_s()
        say(f"{replica.name} ended with status {status}; starting it again in {pause_s:g} s. See {replica.log_path}")
        await asyncio.sleep(pause_s)
        try:
            await replica.start()
            await replica.wait_ready(ready_timeout_s)
        except (EngineError, ConfigError) as error:
            say(f"{replica.name} did not start again: {str(error).splitlines()[0]}")
            await replica.stop()
        else:
            ready_at = loop.time()
            say(f"{replica.name} is ready again at {replica.url}")


class Fleet:
    """Replicas of one kind on this machine, from entering to leaving.

    Entering starts all of them and returns when all are ready; if one fails, the others are stopped and its error is
    raised (ConfigError, EngineGone, EngineTimeout).
    """

    def __init__(self, options: LaunchOptions, *, on_ready: Callable[[ReplicaProcess], None] | None = None) -> None:
        """`on_ready` is called with each replica as it gets ready. Raises: ConfigError."""
        self._options = options
        self._on_ready = on_ready
        kinds = options.roles or (options.engine,) * options.replicas
        names = [f"{kind}-{i}" for i, kind in enumerate(kinds)]
        self.replicas = tuple(
            ReplicaProcess(name, command, options.log_dir / f"{name}.log", grace_s=options.grace_s)
            for name, command in zip(names, commands_for(options), strict=True)
        )

    @property
    def urls(self) -> list[str]:
        return [replica.url for replica in self.replicas]

    async def __aenter__(self) -> Fleet:
        try:
            await self._bring_all_up()
        except BaseException:
            await self.stop()
            raise
        return self

    async def _bring_all_up(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for replica in self.replicas:
                    tasks.create_task(self._bring_up(replica))
        except ExceptionGroup as failures:
            # They usually fail for the same reason; the first one reports it.
            raise failures.exceptions[0] from None

    async def _bring_up(self, replica: ReplicaProcess) -> None:
        await replica.start()
        await replica.wait_ready(self._options.ready_timeout_s)
        if self._on_ready is not None:
            self._on_ready(replica)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop every replica. Returns when all are gone; not cut short by a cancellation."""
        stopping = asyncio.gather(*(replica.stop() for replica in self.replicas))
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await stopping
            raise
