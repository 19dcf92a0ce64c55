"""What the system knows of a connection."""

from __future__ import annotations

import asyncio
import select
import sys


def is_reset(transport: asyncio.Transport) -> bool:
    """Whether the other end has answered something that was sent with a reset; False where the system does not say."""
    if sys.platform == "win32":
        return False
    poll = select.poll()
    try:
        poll.register(transport.get_extra_info("socket").fileno(), 0)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True


def bytes_in_socket(transport: asyncio.Transport) -> int:
    """Bytes that the system has taken and the other end has not confirmed; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0
    import fcntl
    import termios

    try:
        count = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):
        return 0
    return int.from_bytes(count, sys.byteorder)
