"""What the system knows about a connection."""

from __future__ import annotations

import asyncio
import select
import sys


def is_reset(transport: asyncio.Transport) -> bool:
    """Return whether the other end has reset the connection; False where the system does not say."""
    return _polls(transport, 0)


def is_half_closed(transport: asyncio.Transport) -> bool:
    """Return whether the other end has closed its sending half, or reset; False where the system does not say."""
    return _polls(transport, getattr(select, "POLLRDHUP", 0))


def _polls(transport: asyncio.Transport, events: int) -> bool:
    if sys.platform == "win32":
        return False
    poll = select.poll()
    try:
        poll.register(transport.get_extra_info("socket").fileno(), events)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True


def bytes_in_socket(transport: asyncio.Transport) -> int:
    """Return the bytes that the system holds and the other end has not confirmed; 0 where the system does not say."""
    return _ask("TIOCOUTQ", transport)


def bytes_unread(transport: asyncio.Transport) -> int:
    """Return the bytes that have arrived and were not read; 0 where the system does not say."""
    return _ask("FIONREAD", transport)


def _ask(what: str, transport: asyncio.Transport) -> int:
    if sys.platform == "win32":
        return 0
    import fcntl
    import termios

    try:
        count = fcntl.ioctl(transport.get_extra_info("socket").fileno(), getattr(termios, what), bytes(4))
    except (OSError, ValueError):
        return 0
    return int.from_bytes(count, sys.byteorder)
