"""How many front-end processes a gateway starts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from preble.config import GatewayConfig
from preble.engines.registry import may_be_own

MOST = 4
"""With streams one scheduler process feeds three to four front ends (docs/performance.md); each takes memory."""
_GROUPS, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def num_front_ends(config: GatewayConfig, groups: Path = _GROUPS, own_group: Path = _OWN_GROUP) -> int:
    """Return how many front-end processes to start, 0 for one process that does all: the setting, or as many as there
    are cores beside the scheduler's.

    An adapter of the user's own may keep what it learns by probing, and front ends do not probe: then 0.
    """
    if config.workers is not None:
        return config.workers
    return 0 if own_engine(config) is not None else min(usable_cores(groups, own_group) - 1, MOST)


def own_engine(config: GatewayConfig) -> str | None:
    """Return the name of an engine that may be an adapter of the user's own, None if all are built in."""
    engines = (config.engine, *(each.engine for each in config.replicas), *(each.engine for each in config.groups))
    return next((engine for engine in engines if engine is not None and may_be_own(engine)), None)


def usable_cores(groups: Path = _GROUPS, own_group: Path = _OWN_GROUP) -> int:
    """Return how many cores this process may use: at least 1. `groups`: where the limits of control groups are.
    `own_group`: the file that names this process's."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([cores, *_limits(groups, own_group)]), 1)


def _limits(groups: Path, own_group: Path) -> Iterator[int]:
    """Yield the limits, in cores, of this process's control group and of those around it (version 2)."""
    for group in (own := groups / _name(own_group), *own.parents):
        try:
            microseconds, _, period = (group / "cpu.max").read_text().partition(" ")
            yield math.ceil(int(microseconds) / int(period))
        except (OSError, ValueError, ZeroDivisionError):  # there is no limit
            pass
        if group == groups:  # in a container, this is the container's
            return


def _name(own_group: Path) -> str:
    try:
        lines = own_group.read_text().splitlines()
    except OSError:  # another kind of system
        return ""
    return next((line[4:] for line in lines if line.startswith("0::/")), "")
