"""Files that are watched: what changes in them is noticed, however they are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

Contents = list[bytes | None]

_OFF_S = 60.0


async def watch_files(
    files: Callable[[], Iterable[Path]],
    known: Contents,
    interval_s: Callable[[], float],
    on_change: Callable[[], object],
) -> None:
    """Call `on_change` when a file's contents have changed and then stayed the same for one interval. Never returns.

    Contents are compared, not times or names: that sees swapped links (Kubernetes ConfigMaps), network file systems and
    bind mounts, and no half-written file is taken for a whole one. `files`, `interval_s`: asked each time; an interval
    of 0 turns the watch off. `known`: what they held when they were last read.
    """
    last = known
    while True:
        await asyncio.sleep(interval_s() or _OFF_S)
        if not interval_s():
            continue
        now = await asyncio.to_thread(contents, files())
        if now == last and now != known:
            known = now
            try:
                on_change()
            except Exception:  # noqa: BLE001 (a task's root: a failure must not end the watch)
                structlog.get_logger().exception("reload_failed")
        last = now


def contents(files: Iterable[Path]) -> Contents:
    """Return what the files hold; None for one that cannot be read."""
    return [_content(file) for file in files]


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None
