"""An upgrade without a gap: a gateway starts its successor on its own sockets, and leaves once that serves.

The successor is the same command, run from the files that are installed by then. It says through a pipe that it serves.
Until then nothing changes; if it fails, this gateway goes on. Connections that nobody has accepted when this gateway
leaves wait in the sockets, which the successor has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, MutableMapping, Sequence

import structlog

from preble.config import GatewayConfig
from preble.errors import ConfigError
from preble.web.server.listening import inherited, listening_socket

SERVES_S = 300.0
"""How long a successor may take until it serves; a large tokenizer may have to be downloaded."""
_ENDS_S = 10.0
"""How long a successor that has failed may take to end before it is killed."""
_HANDOVER = "_PREBLE_HANDOVER"
"""The environment variable with a successor's open files: the pipe, then the sockets."""
_LOOK_S = 1.0
"""How often a gateway that leaves looks whether its successor lives."""
_GOES_ON = "this gateway goes on, and nothing has changed"


class Inherited:
    """What this process got from its predecessor or systemd. Raises: ConfigError.

    `listeners`: sockets, which another gateway may still serve; empty if there are none.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._pipe: int | None = None
        given = environ.pop(_HANDOVER, "")
        if not given:
            one = inherited(environ)
            self.listeners = [one] if one is not None else []
            return
        try:
            self._pipe, *numbers = map(int, given.split(","))
            os.set_inheritable(self._pipe, False)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{_HANDOVER} is {given!r}, which only a gateway sets; unset it") from error
        self.listeners = [listening_socket(number, _HANDOVER) for number in numbers]

    def serves(self) -> None:
        """Tell the predecessor, or systemd, that this process serves."""
        if self._pipe is None:
            _tell_systemd("READY=1")
            return
        with contextlib.suppress(OSError):  # the predecessor has died
            os.write(self._pipe, b"serves")
        os.close(self._pipe)
        self._pipe = None


class Upgrade:
    """Starts a successor when it is told to, one at a time. `leave`: called once the successor serves."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self._task: asyncio.Task[None] | None = None

    def begin(self, listeners: Sequence[socket.socket], config: GatewayConfig) -> None:
        """Start a successor that has these sockets; does not wait. Nothing happens while another one starts."""
        if self._task is None:
            self._task = asyncio.create_task(self._hand_over(listeners, config))

    def cancel(self) -> None:
        """End the successor if it does not serve yet; `ended` waits for that."""
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Return when no successor is starting."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _hand_over(self, listeners: Sequence[socket.socket], config: GatewayConfig) -> None:
        log = structlog.get_logger()
        log.info("upgrading", command=sys.orig_argv)
        try:
            successor = await _serving_successor(listeners, config)
        except Exception as error:
            known = isinstance(error, (ConfigError, OSError))
            log.error("upgrade_failed", error=str(error), consequence=_GOES_ON, exc_info=None if known else error)
            self._task = None
            return
        _tell_systemd(f"MAINPID={successor.pid}")
        consequence = "this process answers what it has accepted, then ends"
        log.info("upgraded", successor=successor.pid, consequence=consequence)
        self._leave()
        _look_after(successor)


def _look_after(successor: subprocess.Popen[bytes]) -> None:
    """Report a successor that dies, as long as this process runs."""
    if (status := successor.poll()) is None:
        asyncio.get_running_loop().call_later(_LOOK_S, _look_after, successor)
    elif status:
        hint = "its own log says why; start the gateway again"
        structlog.get_logger().error("successor_died", successor=successor.pid, status=status, hint=hint)


async def _serving_successor(listeners: Sequence[socket.socket], config: GatewayConfig) -> subprocess.Popen[bytes]:
    """Start a successor; return it once it serves. Raises: ConfigError, OSError: it does not."""
    if os.getpid() == 1:
        raise ConfigError("a container ends with its first process; replace the container")
    if config.scheduler_socket is not None:
        raise ConfigError("two gateways cannot serve one scheduler_socket; restart this one")
    says, pipe = os.pipe()
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    serves = False
    try:
        try:
            process = _started(pipe, *(listener.fileno() for listener in listeners))
        finally:
            os.close(pipe)
        try:
            asyncio.get_running_loop().add_reader(says, _read, says, heard)
            async with asyncio.timeout(SERVES_S):
                serves = bool(await heard)
            if serves:
                return process
            raise ConfigError(f"the new gateway ended with status {await _ended(process)}; its own log says why")
        except TimeoutError:
            raise ConfigError(f"the new gateway did not serve within {SERVES_S:g} s, and was ended") from None
        finally:
            if not serves:  # also where a stop comes as it says so
                await asyncio.shield(_ended(process))
    finally:
        asyncio.get_running_loop().remove_reader(says)
        os.close(says)


def _started(*numbers: int) -> subprocess.Popen[bytes]:
    """Start this process's command anew, with these open files."""
    environ = {**os.environ, _HANDOVER: ",".join(map(str, numbers))}
    return subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environ, pass_fds=numbers)


def _read(pipe: int, heard: asyncio.Future[bytes]) -> None:
    asyncio.get_running_loop().remove_reader(pipe)  # its end could be read for ever
    if not heard.done():
        heard.set_result(os.read(pipe, 16))


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """End a process, if need be by killing it; return its status."""
    process.terminate()
    try:
        return await asyncio.to_thread(process.wait, _ENDS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return await asyncio.to_thread(process.wait)


def _tell_systemd(state: str) -> None:
    """Report to the service manager that has started the unit, if one has: see sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    name = f"\0{address[1:]}" if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.sendto(state.encode(), name)
