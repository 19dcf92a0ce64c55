"""How far a command is, on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

QUIET_S = 15.0
"""Between two lines where there is no terminal."""


class Tell(Protocol):
    """Shows that `done` of `total` are done; `note`: what else there is to say."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


@contextmanager
def progress(what: str, noun: str) -> Iterator[Tell]:
    """Show how many things are done and how long the rest takes; yields what to call each time. `noun`: the things."""
    if not sys.stderr.isatty():
        yield _lines(what, noun)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    # One thing may take minutes: over a short time their speed says nothing.
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600) as bar:
        task = bar.add_task(what, total=None, note="")

        def tell(done: int, total: int, note: str = "") -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield tell


def _lines(what: str, noun: str) -> Tell:
    began = said = time.monotonic()

    def tell(done: int, total: int, note: str = "") -> None:
        nonlocal said
        if not total:
            return  # everything was there already
        now = time.monotonic()
        if done == total or now - said >= QUIET_S:
            said = now
            left = f", about {duration((now - began) / done * (total - done))} left" if 0 < done < total else ""
            print(f"{what}: {done}/{total} {noun}{', ' if note else ''}{note}{left}", file=sys.stderr, flush=True)

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
