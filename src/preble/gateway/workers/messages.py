"""Messages between the processes of one gateway: what each gets at its start, orders to it, and its replies."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from preble.config import GatewayConfig
from preble.gateway.http.access import KeyRing


@dataclass(frozen=True, slots=True)
class Start:
    """What a process gets at its start. `number`: the front end's, from 0; None for the scheduler process.
    `listeners`: one for each front end, or one that they share, or those of a predecessor with more or fewer of them.

    `path`: of the scheduler's socket. `share`: how many front ends there are. `takes_over`: another gateway may still
    accept at the listeners. `is_first`: of its kind: it starts beside the scheduler process, and waits for that.
    `log`: level and format.
    """

    name: str
    settings: Settings
    path: Path
    share: int
    number: int | None
    listeners: tuple[socket.socket, ...]
    takes_over: bool
    is_first: bool
    log: tuple[str, str]

    def indices(self, number: int) -> Sequence[int]:
        """Return which listeners are a front end's own: each is somebody's, and each front end has or shares one."""
        count = len(self.listeners)
        return range(number, count, self.share) or (number % count,)


class Settings(Struct):
    """An order: use these settings. Answered with `Reconfigured`. `keys`: read once for all processes, so that none has
    others."""

    config: GatewayConfig
    keys: KeyRing


class Cover(Struct):
    """An order: accept connections at the listeners of these dead front ends too, and of no others."""

    numbers: tuple[int, ...]


class Drain(Struct):
    """An order: go on serving, but say that this process is not ready. `leaves`: accept no more; a successor does."""

    leaves: bool = False


class Stop(Struct):
    """An order: end. `within_s`: how long running requests may continue, if not as configured."""

    within_s: float | None = None


class Ping(Struct):
    """An order: say that you are `PingReply`."""


class Ready(Struct):
    """The process does its work."""


class Failed(Struct):
    """The process cannot start, because of the configuration."""

    error: str


class Reconfigured(Struct):
    """`error`: why nothing has changed, None if the new settings hold."""

    error: str | None


class PingReply(Struct):
    """The answer to `Ping`."""


Order = Settings | Cover | Drain | Stop | Ping
Reply = Ready | Failed | Reconfigured | PingReply
