"""What the system knows of processes (Linux)."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def tree(pid: int) -> list[int]:
    """A process and all that it and they have started."""
    return [pid, *(descendant for child in children(pid) for descendant in tree(child))]
