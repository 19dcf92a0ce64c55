"""How many files, which is to say connections, this process may have open."""

from __future__ import annotations

import contextlib
import sys

_WITHOUT_LIMIT = 1024 * 1024
"""Taken where the system sets none, or none that can be asked for."""


def raise_open_files_limit() -> None:
    """Let this process open as many files as it is allowed to: shells and service managers begin with 1,024."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS names a limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_files_limit() -> int:
    """How many this process may have open."""
    if sys.platform == "win32":
        return _WITHOUT_LIMIT
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _WITHOUT_LIMIT if soft == resource.RLIM_INFINITY else soft
