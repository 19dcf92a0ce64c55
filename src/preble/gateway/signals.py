"""Signals are held back until the event loop acts on them, so that none ends a process that starts."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator

_HARMLESS = ("SIGUSR1", "SIGUSR2")
"""Ignored, unless SIGUSR2 upgrades."""
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", *_HARMLESS)


def _numbers(names: tuple[str, ...]) -> list[signal.Signals]:
    return [signal.Signals[name] for name in names if name in signal.Signals.__members__]


def hold() -> None:
    """Have signals wait until `act_on` or `ignore`. Call it before what takes long, such as imports."""
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_BLOCK, _numbers(_NAMES))


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Have signals wait within the context, and in processes that start there until they call `act_on` or `ignore`."""
    hold()
    try:
        yield
    finally:
        _release()


def act_on(stop: Callable[[bool], None], reload: Callable[[], None], upgrade: Callable[[], None] | None = None) -> None:
    """Call these within the running event loop, also for what was held back. `stop`: gets whether to drain first.

    SIGINT and SIGTERM stop, SIGTERM after a drain; SIGHUP reloads; SIGUSR2 upgrades; SIGUSR1 does nothing, and neither
    does SIGUSR2 without `upgrade`.
    """
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop, False)
    loop.add_signal_handler(signal.SIGTERM, stop, True)
    if sys.platform != "win32":
        loop.add_signal_handler(signal.SIGHUP, reload)
    _ignore(_HARMLESS)
    if upgrade is not None and sys.platform != "win32":
        loop.add_signal_handler(signal.SIGUSR2, upgrade)
    _release()


def ignore() -> None:
    """Ignore all of them: another process acts on them, and gives this one orders."""
    _ignore(_NAMES)
    _release()


def _ignore(names: tuple[str, ...]) -> None:
    for number in _numbers(names):
        signal.signal(number, signal.SIG_IGN)


def _release() -> None:
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _numbers(_NAMES))
