"""How far a comparison is, on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

QUIET_S = 15.0
"""Between two lines where there is no terminal."""


@contextmanager
def run_progress() -> Iterator[Callable[[int, int], None]]:
    """Show how many runs were made and how long the rest takes; yields the function to call with (made, in all)."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    columns = (
        TextColumn("runs"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    # Runs take seconds to minutes: over a short time their speed says nothing.
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600) as progress:
        task = progress.add_task("runs", total=None)
        yield lambda made, total: progress.update(task, completed=made, total=total)


def _lines() -> Callable[[int, int], None]:
    began = said = time.monotonic()

    def tell(made: int, total: int) -> None:
        nonlocal said
        if not total:
            return  # every run was there already
        now = time.monotonic()
        if made == total or now - said >= QUIET_S:
            said = now
            left = f", about {duration((now - began) / made * (total - made))} left" if 0 < made < total else ""
            print(f"compare: {made}/{total} runs{left}", file=sys.stderr, flush=True)

    return tell


def duration(seconds: float) -> str:
    """
    >>> duration(42), duration(200), duration(9000)
    ('42 s', '3 min', '2 h 30 min')
    """
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
