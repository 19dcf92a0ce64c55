"""How many files, and so connections, this process may have open."""

from __future__ import annotations

import contextlib
import sys

_WITHOUT_LIMIT = 1024 * 1024
"""Used where the system has no limit, or does not say."""


def raise_open_files_limit() -> None:
    """Raise the soft limit to the hard limit: shells and service managers start processes with 1,024."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS reports a limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_files_limit() -> int:
    """Return how many files this process may have open."""
    if sys.platform == "win32":
        return _WITHOUT_LIMIT
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _WITHOUT_LIMIT if soft == resource.RLIM_INFINITY else soft
