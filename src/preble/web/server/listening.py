"""A socket to listen on, and its URL."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Mapping
from ipaddress import ip_address

from preble.errors import ConfigError

BACKLOG = 2048
"""Connections that wait to be accepted, at most."""
_FIRST_INHERITED = 3


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket at a name or address of this machine; port 0 lets the system choose.

    It is bound at once, so that a port in use is reported before any other work.

    Raises: ConfigError: it cannot be bound; says why and what to do.
    """
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; give a name or address of this machine") from error
    # Protocol named: asyncio turns Nagle's algorithm off only for sockets that say they are TCP's. With Nagle, some
    # answers arrive 40 ms late.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; {_remedy(error)}") from error
    return listener


def listen_shared(host: str, port: int, count: int) -> list[socket.socket]:
    """Do as `listen`, with `count` sockets at one port, among which the system shares out the connections.

    Where the system does not do that, one socket, on which all have to accept.
    Raises: ConfigError: as `listen`, also where other processes share the port already.
    """
    first = listen(host, port)  # alone: so it is refused where another gateway shares the port
    if sys.platform != "linux" or count == 1:
        return [first]
    sockets = [first]
    try:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        for _ in range(count - 1):
            sockets.append(one := socket.socket(first.family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.bind(first.getsockname())
            one.listen(BACKLOG)
            one.setblocking(False)
    except OSError as error:
        for one in sockets:
            one.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; {_remedy(error)}") from error
    return sockets


def inherited(environ: Mapping[str, str]) -> socket.socket | None:
    """Return the listening socket that the process was started with, None if there is none.

    As systemd passes it (socket activation): `LISTEN_PID` names this process, and the socket is file 3. Such a socket
    stays open while processes behind it come and go, so no connection is ever refused.
    Raises: ConfigError: there is more than one, or it is no listening socket.
    """
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    if environ.get("LISTEN_FDS") != "1":
        raise ConfigError(f"LISTEN_FDS is {environ.get('LISTEN_FDS')!r}; pass exactly one socket")
    return listening_socket(_FIRST_INHERITED, "LISTEN_FDS")


def listening_socket(number: int, variable: str) -> socket.socket:
    """Return the socket with this number, which a process was started with; its own children do not get it.

    Raises: ConfigError: it is no listening socket; names the environment variable that said so.
    """
    try:
        listener = socket.socket(fileno=number)
        is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"file {number} is no socket: {error.strerror}; unset {variable}") from error
    if not is_listening:
        raise ConfigError(f"socket {number} does not listen; unset {variable}")
    listener.set_inheritable(False)
    listener.setblocking(False)
    return listener


def is_open_to_network(listener: socket.socket) -> bool:
    """Return whether other machines can reach a listening socket, by its address."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return not ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def _remedy(error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return "give an address of this machine"
    return "choose another port"


def url_of(host: str, port: int) -> str:
    """Return the URL of a server that listens at `host`.

    >>> url_of("127.0.0.1", 8000), url_of("::1", 8000)
    ('http://127.0.0.1:8000', 'http://[::1]:8000')
    """
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
