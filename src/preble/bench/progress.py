"""Progress on stderr: a bar on a terminal, a few lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from preble.metrics import RequestRecord

LINES = 10
"""Lines per run where stderr is no terminal."""


@contextmanager
def request_progress(what: str, num_requests: int) -> Iterator[Callable[[RequestRecord], None]]:
    """Show how many of `num_requests` have ended; yields the function to call with each record."""
    if sys.stderr.isatty():
        with _bar(what, num_requests) as tick:
            yield tick
    else:
        yield _lines(what, num_requests)


@contextmanager
def _bar(what: str, num_requests: int) -> Iterator[Callable[[RequestRecord], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[errors]} failed"),
        TimeElapsedColumn(),
    )
    errors = 0
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=num_requests, errors=0)

        def tick(record: RequestRecord) -> None:
            nonlocal errors
            errors += not record.ok
            progress.update(task, advance=1, errors=errors)

        yield tick


def _lines(what: str, num_requests: int) -> Callable[[RequestRecord], None]:
    done = errors = 0
    step = max(1, num_requests // LINES)

    def tick(record: RequestRecord) -> None:
        nonlocal done, errors
        done += 1
        errors += not record.ok
        if done % step == 0 or done == num_requests:
            print(f"{what}: {done}/{num_requests} requests, {errors} failed", file=sys.stderr, flush=True)

    return tick
