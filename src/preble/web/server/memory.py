"""The memory of a process that serves for long: Python's garbage collector and glibc's allocator, set for it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""From malloc.h."""
_LARGE_BYTES = 256 * 1024
_SPARE_BYTES = 2 * 1024 * 1024
"""How much free memory the process keeps: without any, glibc gives the memory of each body back and asks for it again.
With more, large bodies lie among small objects, which keep their memory."""


def freeze_gc() -> None:
    """Freeze the objects that exist now, and make full garbage collections rare.

    The scheduler's trees are hundreds of thousands of objects, which reference counting frees. A full collection walks
    all of them: with 64 replicas it stopped every request for a tenth of a second. Garbage in cycles, mostly exceptions
    and their tracebacks, is young and is still found.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 10, 1_000)


def return_large_memory() -> None:
    """Have glibc give the memory of large bodies back to the system when they are freed. Elsewhere, do nothing.

    glibc keeps what is below a threshold, which it raises up to 32 MB by itself when larger pieces are freed.
    """
    with _glibc() as libc:
        set_option = libc.mallopt
        set_option(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        set_option(_M_TRIM_THRESHOLD, 2 * _SPARE_BYTES)
        set_option(_M_TOP_PAD, _SPARE_BYTES)


def return_freed_memory() -> None:
    """Give freed memory back to the system, wherever it lies. Takes 0.1 to 0.4 ms for each MB.

    By itself glibc returns only what lies above everything that is in use. Large bodies arrive in pieces smaller than
    `_LARGE_BYTES`, so one small object above the pieces of many bodies would keep the memory of all.
    """
    with _glibc() as libc:
        libc.malloc_trim(0)


@contextlib.contextmanager
def _glibc() -> Iterator[ctypes.CDLL]:
    """End the context without an error where another libc lacks what it is asked for."""
    with contextlib.suppress(AttributeError, TypeError, OSError):
        yield ctypes.CDLL(None)
