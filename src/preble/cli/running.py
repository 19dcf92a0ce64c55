"""Commands that serve or start processes: how they begin, and that they clean up however they end."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from preble.gateway import signals
from preble.logs import LogLosses, configure_logging

if TYPE_CHECKING:
    from preble.config import GatewayConfig
    from preble.config.load import ConfigSources

Result = TypeVar("Result")
TERMINATED_STATUS = 143
SIGN_OF_LIFE_S = 10


def configured(
    config_path: Path | None, log_level: str, log_format: str, flags: Mapping[str, Any]
) -> tuple[GatewayConfig, ConfigSources, LogLosses]:
    """Return the settings of a command that serves, where they come from, and what counts lost log lines.

    `flags`: by the names of settings, `__` for each dot. Signals wait from now on. Raises: ConfigError.
    """
    signals.hold()  # before the imports, which take long
    from preble.config.load import ConfigSources

    sources = ConfigSources(config_path, os.environ, {name.replace("__", "."): value for name, value in flags.items()})
    return sources.load(), sources, configure_logging(log_level, log_format)


def run_cancellable(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` to its end. Ctrl-C and SIGTERM cancel it, so that it stops what it started.

    Raises: KeyboardInterrupt after Ctrl-C; click's Exit (143) after SIGTERM.
    """
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_until_terminated(main))
        except asyncio.CancelledError:
            raise click.exceptions.Exit(TERMINATED_STATUS) from None


async def _until_terminated(main: Coroutine[Any, Any, Result]) -> Result:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await main


@asynccontextmanager
async def reported_waiting(say: Callable[[str], None], at_most_s: float) -> AsyncIterator[None]:
    """Call `say` within the context now and then, so that nobody takes a slow start for none."""

    async def tell() -> None:
        for waited_s in itertools.count(SIGN_OF_LIFE_S, SIGN_OF_LIFE_S):
            await asyncio.sleep(SIGN_OF_LIFE_S)
            say(f"still starting after {waited_s} s, {at_most_s:g} s at most")

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()
