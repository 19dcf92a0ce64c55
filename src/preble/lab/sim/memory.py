"""Fewer garbage collections while a simulation runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = 200_000
"""Allocations between two collections."""


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Let the garbage collector look less often: a simulation keeps much and leaves little behind."""
    usual = gc.get_threshold()
    gc.set_threshold(THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
