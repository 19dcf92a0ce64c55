"""Commands that start processes: they clean up however they end."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import click

Result = TypeVar("Result")
TERMINATED_STATUS = 143
SIGN_OF_LIFE_S = 10


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
