"""Free ports of this machine, for the servers that are started on it."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from preble.errors import ConfigError

_PORTS = range(10_000, 22_000)
"""An engine binds its ports many seconds after we chose them, so they lie below the range that systems take client
ports from (32,768 on Linux as it comes) and the one that SGLang draws a port from at each start (22,000 to 29,999)."""

_CLIENT_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
MIN_PORTS = 1000
"""To choose from; with fewer, fleets that start at the same time would choose the same."""


def free_ports(count: int) -> list[int]:
    """`count` free TCP ports that follow one another. Raises: ConfigError: none found."""
    chance = random.SystemRandom()
    candidates = _never_given_to_clients()
    for _ in range(1000):
        first = chance.choice(candidates[:-count])
        ports = list(range(first, first + count))
        if all(_is_free(port) for port in ports):
            return ports
    raise ConfigError(
        f"found no {count} free ports between {candidates.start} and {candidates.stop}; what uses them all?"
    )


def _never_given_to_clients() -> range:
    """Return those of `_PORTS` that this system gives to no client; all of them where it gives nearly every port."""
    try:
        first_of_clients = int(_CLIENT_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _PORTS
    below = range(_PORTS.start, min(_PORTS.stop, first_of_clients))
    return below if len(below) >= MIN_PORTS else _PORTS


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
